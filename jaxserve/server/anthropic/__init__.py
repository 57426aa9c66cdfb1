"""Anthropic's protocol: messages, and counting their tokens."""

"""Reasoning parsers, one syntax a file."""

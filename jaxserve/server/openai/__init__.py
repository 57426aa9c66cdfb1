"""OpenAI's protocol: completions, chat, models."""

"""Tool parsers, one syntax a file."""

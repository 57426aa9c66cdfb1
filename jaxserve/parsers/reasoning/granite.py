"""Granite 3.2's reasoning: it is announced in words, and so is the answer."""

from __future__ import annotations

from jaxserve.parsers.reasoning.tags import TagReasoningParser


class GraniteReasoningParser(TagReasoningParser):
    """The announcements are plain text."""

    start, end = "Here is my thought process:", "Here is my response:"
    other_starts, other_ends = ("Here's my thought process:",), ("Here's my response:",)

"""Magistral's reasoning: ``[THINK] … [/THINK]``."""

from __future__ import annotations

from jaxserve.parsers.reasoning.tags import TagReasoningParser


class MistralReasoningParser(TagReasoningParser):
    """The tags are special tokens."""

    special_tokens = ("[THINK]", "[/THINK]")
    start, end = "[THINK]", "[/THINK]"

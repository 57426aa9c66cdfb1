"""Qwen 3's reasoning: ``<think> … </think>``, where thinking can be off."""

from __future__ import annotations

from jaxserve.parsers.reasoning.tags import TagReasoningParser


class Qwen3ReasoningParser(TagReasoningParser):
    """An output without tags is an answer without reasoning."""

    special_tokens = ("<think>", "</think>")
    start, end = "<think>", "</think>"

"""DeepSeek R1's reasoning: ``… </think>``, the opening tag being in the prompt or left out."""

from __future__ import annotations

from jaxserve.parsers.reasoning.tags import TagReasoningParser


class DeepSeekR1Parser(TagReasoningParser):
    """An output without tags is reasoning that has not ended."""

    special_tokens = ("<think>", "</think>")
    start, end = "<think>", "</think>"
    assumed = "reasoning"

"""Phi-4's tool calls: ``functools[{"name": …, "arguments": {…}}]`` or ``<|tool_call|>[…]<|/tool_call|>``."""

from __future__ import annotations

from jaxserve.parsers.tools.tagged_calls import TaggedCallsParser


class Phi4Parser(TaggedCallsParser):
    """A list of calls behind the word or the tag."""

    special_tokens = ("<|tool_call|>", "<|/tool_call|>")
    opening = ("functools", "<|tool_call|>")
    closing = ("<|/tool_call|>",)
    lists = True

"""Granite 3's tool calls: ``<|tool_call|>[{"name": …, "arguments": {…}}, …]``."""

from __future__ import annotations

from jaxserve.parsers.tools.tagged_calls import TaggedCallsParser


class GraniteParser(TaggedCallsParser):
    """A list of calls behind the tag; Granite 4 writes single calls and closes the tag."""

    special_tokens = ("<|tool_call|>", "<tool_call>", "</tool_call>")
    opening = ("<|tool_call|>", "<tool_call>")
    closing = ("</tool_call>",)
    lists = True

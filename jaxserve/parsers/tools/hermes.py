"""Hermes's tool calls, which Qwen 2.5 and 3 write, too: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from jaxserve.parsers.interface import CallTag
from jaxserve.parsers.tools.tagged_calls import TaggedCallsParser


class HermesParser(TaggedCallsParser):
    """One JSON object between each pair of tags."""

    special_tokens = ("<tool_call>", "</tool_call>")
    opening = ("<tool_call>",)
    closing = ("</tool_call>",)

    @classmethod
    def call_tag(cls, name: str) -> CallTag:
        return CallTag("<tool_call>", f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>")

"""DeepSeek V3's tool calls: a name, then JSON in a code block (V3, R1) or bare (V3.1), between special tags."""

from __future__ import annotations

import re

from jaxserve.parsers.call_readers import CallReader, NamedCall
from jaxserve.parsers.interface import CallTag
from jaxserve.parsers.tools.tagged_calls import TaggedCallsParser

_CALLS, _CALL = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_HEADER = re.compile(
    rf"function\s*{_SEPARATOR}\s*([\w.-]+)\s*```(?:json)?\s*|([\w.-]+)\s*{_SEPARATOR}\s*(?:```(?:json)?\s*)?"
)


class DeepSeekV3Parser(TaggedCallsParser):
    """``begin function sep name ```json {…} ``` end``, or ``begin name sep {…} end``."""

    special_tokens = (_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END)
    opening = (_CALLS + _CALL, _CALL)
    closing = ("```", _CALL_END, _CALLS_END)

    @classmethod
    def call_tag(cls, name: str) -> CallTag:
        return CallTag(_CALL, f"{_CALL}function{_SEPARATOR}{name}\n```json\n", f"\n```{_CALL_END}")

    def _new_call(self, first: str) -> CallReader | None:
        return NamedCall(_HEADER, self.tools, self._start, self._arguments)

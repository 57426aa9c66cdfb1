"""Calls that a grammar forces as plain JSON, whatever the model's own syntax: one function, or a list of calls."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.parsers.interface import Schemas, ToolParser
from jaxserve.parsers.tools.tagged_calls import TaggedCallsParser


class ForcedCallsParser(TaggedCallsParser):
    """A list of calls, ``[{"name": …, "parameters": {…}}, …]``, from the first character on."""

    opening = ()
    lists = True

    def __init__(self, tools: Schemas, make_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, make_id)
        self._inside = True


class ForcedArgumentsParser(ToolParser):
    """The arguments of the one tool, from the first character on.

    The grammar makes them valid; they break off only where the output is cut.
    """

    def _advance(self, *, final: bool) -> None:
        text = self._buffer if self._num_calls else self._buffer.lstrip()
        if not text:
            return
        if not self._num_calls:
            self._start(next(iter(self.tools)))
        self._arguments(text)
        self._buffer = ""

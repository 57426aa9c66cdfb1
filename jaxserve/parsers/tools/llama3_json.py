"""Llama 3's tool calls: ``{"name": …, "parameters": {…}}``, semicolons between several."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.parsers.interface import Schemas
from jaxserve.parsers.tools.tagged_calls import TaggedCallsParser

_TAG = "<|python_tag|>"


class Llama3JsonParser(TaggedCallsParser):
    """Calls are an output's first words; JSON that is no call, and JSON further on, is content.

    ``<|python_tag|>`` opens calls wherever it stands.
    """

    special_tokens = (_TAG,)
    opening = (_TAG,)

    def __init__(self, tools: Schemas, make_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, make_id)
        self._inside = True  # as if the tag had been read

    def _between(self, *, final: bool) -> None:
        text = self._buffer.lstrip()
        if not self._num_read and text and _TAG.startswith(text[: len(_TAG)]):
            if final or len(text) >= len(_TAG):
                self._leave(keep=True)  # the tag itself opens them
            return
        super()._between(final=final)

    def _punctuation(self, char: str) -> bool:
        if char != ";" or not self._num_read:
            return super()._punctuation(char)
        self._raw += char
        self._buffer = self._buffer.lstrip()[1:]
        return True

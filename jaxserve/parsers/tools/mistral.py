"""Mistral's tool calls: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or newer ``[TOOL_CALLS]name[ARGS]{…}``."""

from __future__ import annotations

import re
import secrets
import string

from jaxserve.parsers.call_readers import CallReader, NamedCall
from jaxserve.parsers.tools.tagged_calls import TaggedCallsParser

_HEADER = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*")
_ALPHABET = string.ascii_letters + string.digits


class MistralParser(TaggedCallsParser):
    """What follows the tag says which of the two forms it is."""

    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    opening = ("[TOOL_CALLS]",)
    lists = True

    @staticmethod
    def default_id() -> str:
        """Nine letters and digits: the templates refuse other ids."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))

    def _new_call(self, first: str) -> CallReader | None:
        if first == "{" or self._in_list:
            return super()._new_call(first)
        return NamedCall(_HEADER, self.tools, self._start, self._arguments)

"""Readers of one call: written as a JSON object, or as a name and a JSON object of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Any, Protocol

from jaxserve.parsers.scan import SPACE, JsonScanner

MAX_NAME = 256
"""Characters of a call's name, and of a key beside it."""
MAX_HEADER = 512
"""Characters between a tag and the brace of the arguments."""


class CallReader(Protocol):
    """Reads one call piece by piece."""

    done: bool
    failed: bool
    started: bool
    """Whether the call is known to be one, and was announced."""

    @property
    def complete(self) -> bool:
        """Whether a started call's arguments are all there."""
        ...

    @property
    def pending(self) -> str:
        """What was read of a started call and not passed on: more arguments if the output ends here, content if
        the call breaks here."""
        ...

    def feed(self, text: str, position: int = 0) -> int:
        """Read on from ``position``; where it stopped: the end, after the call, or at what is wrong."""
        ...


ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCall:
    """Reads one call written as a JSON object, such as ``{"name": "f", "arguments": {…}}``.

    The keys come in any order; arguments may be an object, a string that holds one, or null. ``on_start`` is
    called once the name is known to be right and the arguments begin as an object; then ``on_arguments`` with
    fragments.

    Args:
        names: what may be called.
        on_start: takes the name.
        on_arguments: takes a fragment.
    """

    def __init__(
        self,
        names: Container[str],
        on_start: Callable[[str], None],
        on_arguments: Callable[[str], None],
    ) -> None:
        self.done = False
        self.failed = False
        self.started = False
        self._names = names
        self._on_start = on_start
        self._on_arguments = on_arguments
        self._expect = "{"
        self._key = ""
        self._name: str | None = None
        self._held = ""
        """Arguments that wait for the name, or for what shows that they are an object."""
        self._has_arguments = False
        self._value: JsonScanner | None = None
        self._text = ""
        """The value that is being read, unless it is arguments."""
        self._tail = ""
        """What was read after the arguments of a started call."""

    @property
    def pending(self) -> str:
        if self._has_arguments or self._value is None:
            return self._tail
        return self._value.pending if self._key in ARGUMENT_KEYS else ""

    @property
    def complete(self) -> bool:
        """Whether all arguments were passed on."""
        return self.started and self._has_arguments

    def feed(self, text: str, position: int = 0) -> int:
        """Read on from ``position``; where it stopped: the end, after the object, or at what is wrong."""
        while position < len(text) and not self.done and not self.failed:
            start, after = position, self.complete
            if self._value is not None:
                position = self._read_value(self._value, text, position)
            elif text[position] in SPACE or self._token(text[position]):
                position += 1
            if after:
                self._tail += text[start:position]
        return position

    def _token(self, char: str) -> bool:
        """Take one character between keys and values; False if it is not consumed."""
        expect = self._expect
        if expect in ("key", "first key") and char == '"':
            self._value = JsonScanner()
            return False
        if char == "}" and expect in ("first key", ","):
            self._end()
            return not self.failed
        if expect == "value":
            self._value = JsonScanner()
            return False
        if char != expect:
            self.failed = True
            return False
        self._expect = {"{": "first key", ":": "value", ",": "key"}[expect]
        return True

    def _read_value(self, value: JsonScanner, text: str, position: int) -> int:
        position = value.feed(text, position)
        self.failed = value.failed
        out = value.take()
        if self._expect != "value" or self._key == "name":
            self._text += out
            self.failed = self.failed or len(self._text) > MAX_NAME
        elif self._key in ARGUMENT_KEYS:
            self._read_arguments(out)
        if value.done and not self.failed:
            self._value = None
            self._end_value()
        return position

    def _end_value(self) -> None:
        text, self._text = self._text, ""
        if self._expect != "value":
            self._key = json.loads(text)
            repeated = self._key in ARGUMENT_KEYS and self._has_arguments
            self.failed = repeated or (self._key == "name" and self._name is not None)
            self._expect = ":"
            return
        self._expect = ","
        if self._key == "name":
            name: Any = json.loads(text) if text.startswith('"') else None
            self.failed = not isinstance(name, str) or name not in self._names
            self._name = name
        elif self._key in ARGUMENT_KEYS:
            self._has_arguments = True
            if not self.started and not self._held.startswith("{"):
                self._held = "{}" if self._held == "null" else json.loads(self._held)
                self.failed = not is_object(self._held)
        if not self.failed:
            self._maybe_start()

    def _read_arguments(self, out: str) -> None:
        if self.started:
            self._on_arguments(out)
            return
        self._held += out
        if self._held and self._held[0] not in '{"n':
            self.failed = True
        self._maybe_start()

    def _maybe_start(self) -> None:
        """Start once there is a name, and arguments whose first key shows that they are JSON."""
        if self._name is None or self.started or not self._held.startswith("{") or not self._held[1:].strip():
            return
        self.started = True
        self._on_start(self._name)
        self._on_arguments(self._held)
        self._held = ""

    def _end(self) -> None:
        if self._name is None:
            self.failed = True
            return
        if not self.started:
            self._held = "{}"
            self._maybe_start()
        self.done = True


def is_object(text: Any) -> bool:
    """Whether ``text`` is the text of a JSON object."""
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return False
    scanner = JsonScanner()
    end = scanner.feed(text)
    return scanner.done and not text[end:].strip()


class JsonArguments:
    """Reads a call's arguments, a JSON object, where the name is known before.

    ``on_start`` is called once the first key (or the closing brace) shows that this is JSON; then
    ``on_arguments`` with fragments.
    """

    def __init__(self, on_start: Callable[[], None], on_arguments: Callable[[str], None]) -> None:
        self.done = False
        self.failed = False
        self.started = False
        self._value = JsonScanner()
        self._on_start = on_start
        self._on_arguments = on_arguments
        self._held = ""

    @property
    def complete(self) -> bool:
        return self.done

    @property
    def pending(self) -> str:
        return self._value.pending

    def feed(self, text: str, position: int = 0) -> int:
        """Read on from ``position``; where it stopped: the end, after the object, or at what is wrong."""
        position = self._value.feed(text, position)
        self.failed = self._value.failed
        self._take(self._value.take())
        self.done = self._value.done and self.started
        self.failed = self.failed or (self._value.done and not self.started)
        return position

    def _take(self, out: str) -> None:
        if self.started:
            self._on_arguments(out)
            return
        self._held = (self._held + out).lstrip()
        if self._held and self._held[0] != "{":
            self.failed = True
        elif self._held[1:].strip():
            self.started = True
            self._on_start()
            self._on_arguments(self._held)


class NamedCall:
    """Reads a call whose name comes before its arguments: a header, then a JSON object.

    Args:
        header: all before the brace; one of its groups is the name.
        names: what may be called.
        on_start: takes the name, once it is known to be right and the arguments begin as JSON.
        on_arguments: takes a fragment.
    """

    def __init__(
        self,
        header: re.Pattern[str],
        names: Container[str],
        on_start: Callable[[str], None],
        on_arguments: Callable[[str], None],
    ) -> None:
        self.done = False
        self.failed = False
        self.started = False
        self._pattern = header
        self._names = names
        self._on_start = on_start
        self._header = ""
        self._name: str | None = None
        self._arguments = JsonArguments(self._start, on_arguments)

    @property
    def complete(self) -> bool:
        return self.done

    @property
    def pending(self) -> str:
        return self._arguments.pending

    def feed(self, text: str, position: int = 0) -> int:
        """Read on from ``position``; where it stopped: the end, after the object, or at what is wrong."""
        if self._name is None:
            position = self._read_header(text, position)
        if self._name is not None and position < len(text) and not self.failed:
            position = self._arguments.feed(text, position)
            self.done, self.failed = self._arguments.done, self._arguments.failed
        return position

    def _read_header(self, text: str, position: int) -> int:
        brace = text.find("{", position)
        room = position + MAX_HEADER - len(self._header)
        end = min(room, len(text) if brace < 0 else brace)
        self._header += text[position:end]
        if end == brace:
            match = self._pattern.fullmatch(self._header)
            name = next((group for group in match.groups() if group is not None), None) if match else None
            self.failed = name is None or name not in self._names
            self._name = name
        else:
            self.failed = end == room
        return end

    def _start(self) -> None:
        self.started = True
        self._on_start(self._name or "")

"""What the syntaxes share that write calls behind a tag, their arguments as JSON."""

from __future__ import annotations

from typing import ClassVar

from jaxserve.parsers.call_readers import CallReader, JsonCall
from jaxserve.parsers.interface import ToolParser
from jaxserve.parsers.scan import partial_tag


class TaggedCallsParser(ToolParser):
    """Calls between an opening tag and closing ones that may be missing.

    In a list (``[{…}, {…}]``) or one after the other, with white space between. What breaks off is content,
    from the opening tag on if no call of it was started yet.
    """

    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[tuple[str, ...]] = ()
    """What may follow a call; any number of these, in any order."""
    lists: ClassVar[bool] = False
    """Whether the calls of a tag may stand in a list."""

    _inside = False
    _in_list = False
    _closed = False
    _num_read = 0
    """Calls read behind this opening tag."""
    _call: CallReader | None = None
    _raw = ""
    """What was read since the opening tag, until a call has started: content if it turns out to be none."""

    def _new_call(self, first: str) -> CallReader | None:
        """What reads a call that begins with the character ``first``; None if none does."""
        return JsonCall(self.tools, self._start, self._arguments) if first == "{" else None

    def _advance(self, *, final: bool) -> None:
        while self._buffer:
            before = (len(self._buffer), self._inside, self._call is None)
            if self._call is not None:
                self._read_call(self._call)
            elif self._inside:
                self._between(final=final)
            else:
                self._outside(final=final)
            if before == (len(self._buffer), self._inside, self._call is None):
                break
        if final and self._inside:
            if self._call is not None and self._call.started and not self._call.complete:
                self._arguments(self._call.pending)
            self._leave(keep=self._call is not None or not self._num_read)

    def _outside(self, *, final: bool) -> None:
        """Content up to the next opening tag."""
        tag = self._take_tag(self.opening, final=final)
        if tag is None:
            return
        self._raw = tag
        self._inside, self._in_list, self._closed, self._num_read = True, False, False, 0

    def _between(self, *, final: bool) -> None:
        """Behind an opening tag, before or after a call."""
        text = self._buffer.lstrip()
        self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if not text:
            return
        closing = next((tag for tag in self.closing if text.startswith(tag)), None)
        if closing is not None and self._num_read and not self._in_list:
            self._buffer = text[len(closing) :]
            self._closed = True
        elif partial_tag(text, self.closing) == len(text):
            # Perhaps a closing tag; one that the end of the output cuts is dropped.
            if final and self._num_read and not self._closed:
                self._buffer = ""
            elif final:
                self._leave(keep=not self._num_read)
        elif self._closed or not self._punctuation(text[0]):
            self._begin_call(text[0])

    def _punctuation(self, char: str) -> bool:
        """Take a bracket or comma of the list, if ``char`` is one."""
        if char == "[":
            if not self.lists or self._in_list or self._num_read:
                return False
            self._in_list = True
        elif char == "]":
            if not self._in_list:
                return False
            self._in_list = False
        elif not (char == "," and self._in_list and self._num_read) and not (
            char == "}" and self._num_read and not self._in_list  # models close one brace too many
        ):
            return False
        self._raw += char
        self._buffer = self._buffer[1:]
        return True

    def _begin_call(self, first: str) -> None:
        expected = not self._closed and (self._in_list or not self.lists or not self._num_read)
        self._call = self._new_call(first) if expected else None
        if self._call is None:
            self._leave(keep=not self._num_read)

    def _read_call(self, call: CallReader) -> None:
        end = call.feed(self._buffer)
        self._raw = "" if call.started else self._raw + self._buffer[:end]
        self._buffer = self._buffer[end:]
        if call.done:
            self._call, self._num_read = None, self._num_read + 1
        elif call.failed:
            self._raw += call.pending if call.started else ""
            self._leave(keep=True)

    def _leave(self, *, keep: bool) -> None:
        """Go on outside; ``keep`` shows what was read of a call that did not start."""
        if keep:
            self._content(self._raw)
        self._raw, self._inside, self._call = "", False, None

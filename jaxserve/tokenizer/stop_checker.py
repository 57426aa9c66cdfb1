"""StopChecker: finds stop strings in streamed text, across the borders of its pieces.

The idea: a stop string that is not complete yet begins in the longest end of the text that begins one. That
end is held back, all before it is released, so that a reader never sees part of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """The stop strings of one request.

    The match that ends first wins, and of those the one that begins first: the same whether the text comes by
    characters or at once.

    Args:
        stop: the stop strings, none of them empty.
        include_stop_str: keep the stop string in the text; then nothing needs to be held back.
    """

    __slots__ = ("_held", "_include", "_last_characters", "_longest", "_stop")

    def __init__(self, stop: Sequence[str], include_stop_str: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_stop_str
        self._last_characters = frozenset(character for text in stop for character in text[:-1])
        self._longest = max((len(text) - 1 for text in stop), default=0)
        self._held = ""

    def feed(self, text: str, *, search: bool = True) -> tuple[str, str | None]:
        """Take new text.

        Args:
            text: what follows the text fed so far.
            search: False where stop strings do not count yet (``min_tokens``); one may begin there, not end.

        Returns:
            The text that may be shown now, and the stop string found, if any. After that, feed no more.
        """
        held = self._held
        whole = held + text
        if search:
            found = self._find(whole, len(held))
            if found is not None:
                begin, stop = found
                self._held = ""
                if self._include:
                    return whole[len(held) : begin + len(stop)], stop
                return whole[:begin], stop
        keep = self._length_to_hold(whole)
        self._held = whole[len(whole) - keep :]
        if self._include:
            return text, None
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """The end: the text that was held back for nothing."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _find(self, whole: str, after: int) -> tuple[int, str] | None:
        """Begin and text of the stop string that ends first beyond position ``after``."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            begin = whole.find(stop, max(0, after - len(stop) + 1))
            if begin >= 0:
                candidate = (begin + len(stop), begin, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _length_to_hold(self, whole: str) -> int:
        if not whole or whole[-1] not in self._last_characters:
            return 0
        for length in range(min(self._longest, len(whole)), 0, -1):
            end = whole[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return length
        return 0

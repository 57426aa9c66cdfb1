"""Stop strings are found wherever the text is cut, and no part of one is ever shown."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.tokenizer.stop_checker import StopChecker

texts = st.text("ab\n", max_size=14)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: list[str], stop: list[str], include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stop, include)
    shown: list[str] = []
    for piece in pieces:
        text, found = checker.feed(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, checker.flush()], None


def expected(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


@given(texts, stops, st.booleans(), st.lists(st.integers(0, 14), max_size=6))
def test_every_split_finds_the_match_that_ends_first(
    text: str, stop: list[str], include: bool, cuts: list[int]
):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    for parts in (pieces, list(text), [text]):
        shown, found = run(parts, stop, include)
        assert ("".join(shown), found) == expected(text, stop, include)


@given(texts, stops)
def test_what_is_shown_never_reaches_into_a_stop_string(text: str, stop: list[str]):
    final, _ = expected(text, stop, include=False)
    checker = StopChecker(stop)
    shown = ""
    for character in text:
        piece, found = checker.feed(character)
        shown += piece
        assert final.startswith(shown)
        if found:
            break


def test_only_what_may_begin_a_stop_string_is_held_back():
    checker = StopChecker(["END."])
    assert checker.feed("the E") == ("the ", None)
    assert checker.feed("N") == ("", None)
    assert checker.feed("gine") == ("ENgine", None)
    assert checker.feed(" EN") == (" ", None)
    assert checker.flush() == "EN"
    assert checker.flush() == ""


def test_including_the_stop_string_holds_nothing_back():
    checker = StopChecker(["END"], include_stop_str=True)
    assert checker.feed("the E") == ("the E", None)
    assert checker.feed("ND and more") == ("ND", "END")


def test_stop_strings_that_end_before_min_tokens_do_not_count():
    checker = StopChecker(["ab", "b"])
    assert checker.feed("xab", search=False) == ("xab", None)
    assert checker.feed("a", search=False) == ("", None)
    assert checker.feed("b") == ("", "ab")


def test_a_held_end_is_not_searched_again():
    checker = StopChecker(["abc", "b"])
    assert checker.feed("ab", search=False) == ("", None)
    assert checker.feed("x") == ("abx", None)


@pytest.mark.parametrize("stop", [["."], ["a", "."]])
def test_single_characters(stop: list[str]):
    assert run(["hello", " world.", " more"], stop) == (["hello", " world"], ".")

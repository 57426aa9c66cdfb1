"""What is lowered before the weights are loaded, whether it is kept afterwards, and when it is made once more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.errors import OutOfMemoryError
from jaxserve.runner.cache_sizer import CacheSize
from jaxserve.runner.preparation import Preparation

pytestmark = pytest.mark.device

EARLY, ESTIMATE = 1000, 5


class Programs:
    """Stands for what there is to make and for what is made, and notes what becomes of it.

    Args:
        fixed: as on a GPU.
        lacking: what the compiled programs turn out to need; None: no more than was thought.
    """

    def __init__(self, *, fixed: bool, lacking: int | None = None) -> None:
        self.style = SimpleNamespace(fixed_addresses=fixed)
        self.needed, self.events, self.noted = lacking, [], []

    def for_cache(self, num_blocks: int, max_model_len: int) -> Any:
        def note(what: str):
            return lambda *_: self.events.append((what, num_blocks, max_model_len))

        store = SimpleNamespace(hits=0, note=lambda key, value: self.noted.append((key, value)))
        return SimpleNamespace(
            lower=note("lower"), compile=note("compile"), abandon=note("abandon"), store=store, compiled={},
            lacking=lambda given: self.needed, largest="largest", key=lambda program: program,
        )  # fmt: skip


class Sizer:
    """Sizes: ``EARLY`` blocks before the weights are loaded, ``measured`` afterwards, ``least`` for programs that need
    more; None does not fit."""

    def __init__(
        self, programs: Programs, measured: int, *, early: int | None = EARLY, least: int = 0
    ) -> None:
        self.programs, self.early, self.measured, self.least = programs, early, measured, least
        self.is_given = False

    def choose(self, *, before_weights: bool = False) -> CacheSize:
        num_blocks = self.early if before_weights else self.measured
        if num_blocks is None:
            raise OutOfMemoryError("No block fits.")
        return CacheSize(num_blocks, 64 if before_weights else 32, ESTIMATE, self.programs.for_cache(0, 0))

    def fit(self, temporaries: int) -> CacheSize:
        return CacheSize(self.measured if temporaries == ESTIMATE else self.least, 16, temporaries)


@pytest.mark.parametrize(("measured", "kept"), [(1000, True), (1049, True), (1060, False), (999, False)])
def test_a_cache_sized_before_the_weights_is_kept_if_it_fits_and_wastes_little(measured, kept):
    programs = Programs(fixed=True)
    preparation = Preparation(Sizer(programs, measured), programs)
    preparation.begin()
    assert programs.events == [("lower", EARLY, 64)]
    size = preparation.finish().size
    if kept:
        assert (size.num_blocks, size.max_model_len) == (EARLY, 64)
        assert programs.events[1:] == [("compile", EARLY, 64)]
    else:
        assert (size.num_blocks, size.max_model_len) == (measured, 32)
        assert programs.events[1:] == [("abandon", EARLY, 64), ("compile", measured, 32)]
    preparation.abandon()
    assert programs.events[-1] == ("abandon", EARLY, 64)


@pytest.mark.parametrize(("fixed", "early"), [(False, EARLY), (True, None)])
def test_what_only_weights_tell_is_left_until_they_are_loaded(fixed, early):
    programs = Programs(fixed=fixed)
    preparation = Preparation(Sizer(programs, 900, early=early), programs)
    preparation.begin()
    assert not programs.events
    assert preparation.finish().size.num_blocks == 900
    assert programs.events == [("compile", 900, 32)]


@pytest.mark.parametrize(("least", "used"), [(700, (700, 16)), (1000, (1000, 64)), (1100, (1000, 64))])
def test_programs_that_need_more_than_was_thought(least, used):
    """Later starts are told, and everything is compiled again if the cache must be smaller."""
    programs = Programs(fixed=True, lacking=77)
    preparation = Preparation(Sizer(programs, EARLY, least=least), programs)
    preparation.begin()
    size = preparation.finish().size
    assert (size.num_blocks, size.max_model_len) == used
    assert programs.noted == [("largest", 77)]
    again = [("compile", *used)] if used[0] < EARLY else []
    assert programs.events == [("lower", EARLY, 64), ("compile", EARLY, 64), *again]

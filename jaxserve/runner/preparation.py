"""Preparation: sizes the cache and gets its programs ready, lowering them while the weights are still being loaded.

A program is for a cache of one size. Where that can be told from the weights' own size, lowering starts before they are
loaded; what they took then decides whether those programs are kept.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax

from jaxserve.errors import OutOfMemoryError
from jaxserve.runner.cache_sizer import CacheSize, CacheSizer
from jaxserve.runner.engine_programs import EnginePrograms
from jaxserve.runner.programs import StepPrograms

logger = logging.getLogger(__name__)

LOST_TO_ESTIMATE = 0.05
"""Of a cache's blocks, how many may be missing because the weights' size was estimated: ``COARSE_BLOCKS`` of a large
one, a few of a small one."""


@dataclass(frozen=True)
class PreparedPrograms:
    """Programs, and the cache that they are for."""

    size: CacheSize
    programs: StepPrograms


class Preparation:
    """One start's: ``begin``, then the weights are loaded, then ``finish``; in the end ``abandon``, whatever happened.

    Args:
        sizer: of the cache.
        programs: what there is to make.
    """

    def __init__(self, sizer: CacheSizer, programs: EnginePrograms) -> None:
        self._sizer, self._programs = sizer, programs
        self._early: PreparedPrograms | None = None

    def begin(self) -> None:
        """Begin to lower the programs, which no weights are needed for but to know how large the cache will be.

        Not where only the weights, or a compilation, tell. No program is compiled before they are loaded: compilers try
        things out on the device, and between the weights that would leave holes.
        """
        if jax.process_count() > 1 or not (self._sizer.is_given or self._programs.style.fixed_addresses):
            return
        try:
            size = self._sizer.choose(before_weights=True)
        except OutOfMemoryError:  # said once it is certain
            return
        self._early = self._make(size)
        self._early.programs.lower(tell_progress)

    def finish(self) -> PreparedPrograms:
        """Choose the cache's size, now that the weights are there, and compile for it.

        Raises:
            OutOfMemoryError: one request does not fit.
        """
        prepared = self._early_or_now()
        compile_all(prepared.programs)
        size, trial = prepared.size, prepared.size.trial
        if trial is None or not self._programs.style.fixed_addresses:
            return prepared
        needed = prepared.programs.lacking(size.temporaries)
        if needed is None:
            return prepared
        logger.warning(
            "Programs need %d MiB more than was estimated.", (needed - size.temporaries) / (1 << 20)
        )
        trial.store.note(trial.key(trial.largest), needed)
        smaller = self._sizer.fit(needed)
        if smaller.num_blocks >= size.num_blocks:  # fewer were made room for than there is
            return prepared
        prepared = self._make(smaller)
        compile_all(prepared.programs)
        return prepared

    def abandon(self) -> None:
        """End what ``begin`` began, if it still goes on."""
        if self._early is not None:
            self._early.programs.abandon()
        self._early = None

    def _make(self, size: CacheSize) -> PreparedPrograms:
        return PreparedPrograms(size, self._programs.for_cache(size.num_blocks, size.max_model_len))

    def _early_or_now(self) -> PreparedPrograms:
        """What is being lowered, if its size is as good as what is now known; or else that."""
        early = self._early
        if early is not None:
            expected = early.size.num_blocks
            measured = self._sizer.fit(early.size.temporaries).num_blocks
            if 0 <= measured - expected <= measured * LOST_TO_ESTIMATE:
                return early
            early.programs.abandon()
            logger.info(
                "Weights leave room for %d blocks, not for %d: programs are made anew.", measured, expected
            )
        return self._make(self._sizer.choose())


def compile_all(programs: StepPrograms) -> None:
    """Get every program ready, and say so."""
    programs.compile(tell_progress)
    if programs.store.hits:
        logger.info(
            "%d of %d programs were stored by an earlier start", programs.store.hits, len(programs.compiled)
        )


def tell_progress(done: int, total: int) -> None:
    """Log that so many of all programs are ready, now and then."""
    if done == total or done % 4 == 0:
        logger.info("Compiled %d of %d programs", done, total)

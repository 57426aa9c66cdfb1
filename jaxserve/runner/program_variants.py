"""Which programs an engine has: their keys, and how a platform cuts its steps into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.buckets import Bucket, BucketTable
from jaxserve.runner.burst_program import BURST_SAMPLERS
from jaxserve.sampling.metadata import ALL_FEATURES, Feature

SAMPLERS = (ALL_FEATURES, Feature.TOP_K, Feature.NONE)
"""What programs hold of the sampler: everything, which has branches; random with a top-k, and greedy, which have
none."""
SPARED_ROWS = 16
"""Rows for which the head of twice as many samples as fast as one of their own would."""
FEWEST_LOGITS = 8
"""Rows of the smallest head. A library multiplies one row no faster, and XLA without its own products would turn the
whole weight into float32 for it."""


@dataclass(frozen=True)
class StepVariant:
    """One step program: a bucket, with all that a step may hold or without what it need not.

    Args:
        bucket: its shape.
        features: what of the sampler it holds; a fixed one holds none.
        decode_only: rows of one token alone.
        fixed: the first half of a step between fixed addresses (``run_forward``).
    """

    bucket: Bucket
    features: Feature = ALL_FEATURES
    decode_only: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class HeadVariant:
    """The second half of a step between fixed addresses (``run_head``).

    Args:
        num_rows: at most so many.
        features: what of the sampler it holds.
    """

    num_rows: int
    features: Feature


@dataclass(frozen=True)
class BurstVariant:
    """A program of several decode steps (``run_burst``).

    Args:
        bucket: the shape of each.
        num_steps: how many.
        features: what it holds of the sampler.
        decode_only, fixed: as ``StepVariant`` has them.
    """

    bucket: Bucket
    num_steps: int
    features: Feature
    decode_only: bool
    fixed: bool


@dataclass(frozen=True)
class ProgramStyle:
    """How a platform's steps are cut into programs.

    Args:
        decode_programs: compile steps that only decode on their own, one for each of ``SAMPLERS``. Accelerators gain
            from it: a branch costs them a round trip to the host. On CPUs one program serves all.
        fixed_addresses: steps are two programs each, between buffers that never move, which CUDA graphs gain from.
    """

    decode_programs: bool
    fixed_addresses: bool

    @property
    def warm_up_runs(self) -> int:
        """Runs of a program after which it does nothing for the first time. XLA makes the CUDA graph of a program in
        its second run (15 ms of 400 kernels)."""
        return 2 if self.fixed_addresses else 1

    @classmethod
    def of(cls, platform: str) -> ProgramStyle:
        return cls(decode_programs=platform != "cpu", fixed_addresses=platform == "gpu")


def step_variants(table: BucketTable, style: ProgramStyle) -> list[StepVariant]:
    """Every step program, the largest first: they compile longest."""
    variants: list[StepVariant] = []
    fixed = style.fixed_addresses
    for bucket in reversed(table.buckets):
        if bucket in table.mixed:
            variants.append(StepVariant(bucket, Feature.NONE if fixed else ALL_FEATURES, False, fixed))
        if bucket in table.decode:
            samplers = (Feature.NONE,) if fixed else SAMPLERS
            variants += [StepVariant(bucket, features, True, fixed) for features in samplers]
    return variants


def head_variants(variants: Sequence[StepVariant]) -> list[HeadVariant]:
    """The second halves that steps between fixed addresses need, the largest first.

    They follow a step's rows, not its tokens: a long prompt alone needs the logits of one row. The whole sampler takes
    longer to compile than many layers, and so has powers of two (and the largest) alone, without ``SPARED_ROWS``. None
    has fewer rows than ``FEWEST_LOGITS``.
    """
    fixed = [variant.bucket.num_rows for variant in variants if variant.fixed]
    decoding = {variant.bucket.num_rows for variant in variants if variant.fixed and variant.decode_only}
    rows = sorted({max(num_rows, FEWEST_LOGITS) for num_rows in (*decoding, *fixed[:1])}, reverse=True)
    coarse = [
        num_rows
        for num_rows in rows
        if num_rows == rows[0] or (num_rows & (num_rows - 1) == 0 and num_rows != SPARED_ROWS)
    ]
    return [
        HeadVariant(num_rows, features)
        for features in SAMPLERS
        for num_rows in (coarse if features == ALL_FEATURES else rows)
    ]


def burst_variants(builder: BatchBuilder, style: ProgramStyle) -> list[BurstVariant]:
    """Every program of bursts, the largest first."""
    decode_only, fixed = bool(builder.table.decode), style.fixed_addresses
    return [
        BurstVariant(bucket, layout.num_steps, features, decode_only, fixed)
        for bucket, layout in reversed(builder.burst_layouts.items())
        for features in BURST_SAMPLERS
    ]

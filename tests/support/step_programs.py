"""The programs of a model's steps, as the runner makes them, without an engine: to be lowered and looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.models import Model
from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.buckets import Bucket, BucketTable
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.programs import ProgramShapes, StepPrograms


def step_programs(
    model: Model,
    backend: Any,
    buckets: Sequence[Bucket],
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_blocks_per_row: int,
    placement: Placement | None = None,
) -> StepPrograms:
    """For a cache in the model's compute type."""
    placement = placement or Placement()
    devices = model.context.tensor_parallel_size
    shapes = ProgramShapes(
        max_num_seqs=max_num_seqs, vocab_size=model.vocab_size, max_logprobs=20, num_blocks=num_blocks,
        block_size=block_size, max_blocks_per_row=max_blocks_per_row,
        kv_cache_shapes=tuple(
            backend.kv_cache_shape(num_blocks, block_size, spec.on_one_of(devices).num_kv_heads, spec.head_size)
            for spec in model.kv_cache_specs()
        ),
        kv_cache_dtype=model.dtype, num_ranks=placement.num_ranks, block_axis=backend.block_axis(),
        has_experts=model.has_experts,
    )  # fmt: skip
    builder = BatchBuilder(BucketTable(tuple(buckets), tuple(buckets)), block_size, max_num_seqs)
    return StepPrograms(model, builder, shapes, [], ProgramStore(None, ""), placement)

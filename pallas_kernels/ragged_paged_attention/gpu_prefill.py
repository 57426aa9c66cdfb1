"""Causal attention of rows with several queries for Hopper (Mosaic GPU): prompts, chunks and mixed steps.

Central ideas:

* FlashAttention 3's shape: in each CTA (thread block) one warpgroup loads, two compute 64 rows of scores each, taking
  turns on the tensor cores while the other does its softmax.
* The query heads of a group share a tile, so 64 rows are a few tokens by ``group`` heads (row = head * tokens + token)
  and short rows of the batch waste little. Tiles are laid at the end of a row overlapping the one before (the same
  result is written twice) so that only rows shorter than a tile need care at their borders.
* One persistent grid over a list of tiles that ``plan_prefill`` makes on the device, longest first, dealt out in
  alternating direction. Keys are walked in steps at absolute positions, and a masked step changes nothing to the last
  bit, so a token's result depends neither on the tile nor on the chunk it was computed in.
* New keys and values are in the cache already (``kv_cache_update``).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.ragged_paged_attention.gpu_prefill_case import Case, scratch
from pallas_kernels.ragged_paged_attention.gpu_prefill_kernel import LOG2E, kernel_body
from pallas_kernels.ragged_paged_attention.gpu_prefill_plan import (
    CONSUMERS,
    ROWS,
    PrefillPlan,
    TileShape,
    tile_shape,
)
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions


def prefill_attention(
    q: jax.Array,
    kv_cache: Any,
    metadata: AttentionMetadata,
    plan: PrefillPlan,
    options: AttentionOptions,
    sinks: jax.Array | None,
    out: Any,
    *,
    num_sms: int,
    scales: jax.Array | None = None,
    interpret: Any = None,
) -> None:
    """Attend the tokens of rows that do not decode; zero those of padding.

    Args:
        q: [T, H, D], bfloat16 or float16.
        kv_cache: reference to [2, num_blocks, K, block_size, D], of q's type, float8 or int8, the new tokens written
            already.
        plan: of this batch.
        sinks: [H] extra logits of the denominator.
        out: reference to [T, H, D].
        scales: float32 [num_blocks, 2, K, block_size] of an int8 cache, the new tokens' written already.
    """  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config = plan.config
    num_heads, head_size = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    group = num_heads // num_kv_heads
    shape = tile_shape(group)
    if q.shape[0] < shape.tokens_per_cta:
        raise ValueError(f"prefill needs at least {shape.tokens_per_cta} (padded) tokens, got {q.shape[0]}")
    operands = [plan.tiles, plan.counts, metadata.block_tables, metadata.seq_lens, q]
    if sinks is not None:
        operands.append(_sinks_by_row(sinks.astype(jnp.float32) * LOG2E, num_kv_heads, group, shape))
    if scales is not None:
        operands.append(scales)
    case = Case(
        config, options, shape, group, head_size, block_size, has_sinks=sinks is not None, num_ctas=num_sms,
        widens=kv_cache.dtype != q.dtype, scaled=scales is not None, interpreted=interpret is not None,
    )  # fmt: skip
    build = functools.partial(
        plgpu.kernel,
        kernel_body(case),
        grid=(num_sms,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch(case, q.dtype, kv_cache.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not config.auto_barriers
        ),
        kernel_name="paged_prefill",
        interpret=interpret,
    )
    operands.append(kv_cache[...])  # only read
    batched = [0, 2, 3, 4, len(operands)]
    launch(
        lambda out_type: build(out_type=out_type),
        ("paged_prefill", case),
        operands,
        [out],
        batched=batched,
        interpret=interpret,
    )


def _sinks_by_row(sinks: jax.Array, num_kv_heads: int, group: int, shape: TileShape) -> jax.Array:
    """[K, consumers, ROWS]: the sink of the query head that each row of a tile belongs to."""
    sinks = sinks.reshape(num_kv_heads, group)
    row = jnp.arange(ROWS) // shape.tokens
    consumer = jnp.arange(CONSUMERS)[:, None]
    head = row[None] if shape.splits_tokens else consumer * shape.heads + row[None]
    head = jnp.broadcast_to(jnp.minimum(head, group - 1), (CONSUMERS, ROWS))
    return sinks[:, head]

"""Decode attention for Hopper (Mosaic GPU): rows with one query each, split over the context, cache write fused in.

Central ideas:

* One persistent grid. ``gpu_decode_plan`` lays the live work out as one line of steps (``step`` keys each): rows in
  order, in a row its context in order. Every group of CTAs (thread blocks) gets an equal stretch of the line, so one
  long row and many short rows both fill the chip, and padding rows have no steps. A group has one CTA per KV head:
  they walk the same blocks at the same time, which memory likes better than scattered reads.
* A sequence (one row and KV head) is cut into chunks at absolute positions; the chunk size follows the row's own
  length only. A chunk is reduced on its own (online softmax) and chunks are folded in order, in float32, whether one
  CTA did them all or many did: a row's result does not depend on the rest of the batch. Stretches end at chunk
  borders. A sequence that spans CTAs leaves its chunks in global memory, and the CTA that finishes last folds them.
* Scores are computed transposed, S^T = K Q^T and O^T = V^T P^T, so that the keys fill the 64 rows which the
  instruction wants and the query heads of a group, padded to 8, are its columns: each key and value is read once.
* The new token's key and value are patched into the loaded tile and copied to their cache slot by the only CTA
  that reads that tile. Masked values are set to zero there, so a slot that was never written may hold NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.ragged_paged_attention.gpu_decode_case import Case, scratch
from pallas_kernels.ragged_paged_attention.gpu_decode_kernel import LOG2E, kernel_body
from pallas_kernels.ragged_paged_attention.gpu_decode_plan import DecodePlan, columns_of
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: Any,
    metadata: AttentionMetadata,
    plan: DecodePlan,
    options: AttentionOptions,
    sinks: jax.Array | None,
    *,
    out: Any = None,
    scales: jax.Array | None = None,
    interpret: Any = None,
) -> jax.Array | None:
    """Write the decoding rows' new keys and values into ``kv_cache`` and attend.

    Args:
        q: [T, H, D]: token r belongs to decoding row r. bfloat16 or float16.
        k, v: [T, K, D], in the cache's type.
        kv_cache: reference to [2, num_blocks, K, block_size, D], of q's type, float8 or int8; changed in place.
        plan: of this batch; its ``counters`` a reference.
        sinks: [H] extra logits of the denominator.
        out: reference to [T, H, D] that takes the decoding rows' results; without it they are returned.
        scales: float32 [num_blocks, 2, K, block_size] of an int8 cache, the new tokens' written already.

    Returns:
        [R, H, D], or None with ``out``. Padding rows are zero; rows that live but do not decode are NaN, since the
        caller then chose the wrong program.
    """  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_rows, config = plan.rows.shape[0], plan.config
    num_heads, head_size = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    group = num_heads // num_kv_heads
    columns = columns_of(group)
    case = Case(
        config, options, group, columns, head_size, block_size, writes_all_rows=out is None,
        has_sinks=sinks is not None, atomic=interpret is None, widens=kv_cache.dtype != q.dtype,
        scaled=scales is not None,
    )  # fmt: skip
    ctas = plan.stretches.shape[0] * num_kv_heads
    slots = ctas * (config.max_chunks + 1)
    partials = (
        jax.ShapeDtypeStruct((slots, head_size, columns), jnp.float32),
        jax.ShapeDtypeStruct((slots, 2, columns), jnp.float32),
    )
    operands = [plan.rows, plan.stretches, metadata.block_tables, metadata.slot_mapping, q, k, v]
    if sinks is not None:
        sinks = (sinks.astype(jnp.float32) * LOG2E).reshape(num_kv_heads, group)
        sinks = jnp.pad(sinks, ((0, 0), (0, columns - group)))
        operands.append(jnp.tile(sinks[:, :4], (1, 2)) if case.merges_halves else sinks)
    if scales is not None:
        operands.append(scales)
    refs = [plan.counters, kv_cache]
    batched = [0, 2, 3, 4, 5, 6]
    if out is None:
        results_type = (jax.ShapeDtypeStruct((num_rows, num_heads, head_size), q.dtype), *partials)
        batched.append(len(operands) + len(refs))
    else:
        results_type = partials
        refs.append(out)
        batched.append(len(operands) + len(refs) - 1)
    build = functools.partial(
        plgpu.kernel,
        kernel_body(case),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=scratch(case, q.dtype, kv_cache.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=1024, unsafe_no_auto_barriers=not config.auto_barriers
        ),
        kernel_name="paged_decode",
        interpret=interpret,
    )
    results = launch(
        lambda out_type: build(out_type=out_type),
        ("paged_decode", case),
        operands,
        refs,
        results_type,
        batched=batched,
        interpret=interpret,
    )
    return results[0] if out is None else None

"""The cache write for Hopper (Mosaic GPU): each new token's keys and values to their slot, in place.

Tokens go through shared memory in batches of ``BATCH``; a token's [K, D] keys leave as one strided copy.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.mosaic_gpu.primitives import whole_lines

BATCH = 8
"""Tokens moved at a time by one CTA."""

STAGES = 2


def kv_cache_update(
    kv_cache: Any,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    live_tokens: jax.Array,
    *,
    num_sms: int,
    interpret: Any = None,
) -> None:
    """Write ``k`` and ``v`` into the cache.

    Args:
        kv_cache: reference to [2, num_blocks, K, block_size, D], changed in place.
        k, v: [T, K, D] in the cache's type.
        slot_mapping: [T] int32 flat slots; out of range drops the write.
        live_tokens: [1] int32; tokens from there on are padding and are not looked at.
    """  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_tokens, num_kv_heads, head_size = k.shape
    num_blocks, block_size = kv_cache.shape[1], kv_cache.shape[3]
    batch = min(BATCH, num_tokens)
    num_ctas = 2 * num_sms
    # A token's keys leave from the start of a line of shared memory: behind an odd number of small heads is one more.
    token = num_kv_heads * head_size
    in_one_piece = whole_lines(token, k.dtype) == token
    heads = num_kv_heads if in_one_piece else num_kv_heads + 1
    sizes = jnp.stack([live_tokens[0], jnp.int32(num_tokens)])

    def paged_update(k, v, slot_mapping, sizes, cache, *, new_s, full):
        cta = lax.axis_index("cta")
        live, num_tokens = sizes[0], sizes[1]
        turns = pl.cdiv(jnp.maximum(live - cta * batch, 0), num_ctas * batch)

        def first_token(turn):
            # The last batch is loaded from earlier on rather than past the array's end.
            return jnp.minimum((cta + turn * num_ctas) * batch, num_tokens - batch)

        def token_at(stage, half, i):
            ours = new_s.at[stage, half, i]
            return ours if in_one_piece else ours.at[pl.ds(0, num_kv_heads)]

        def load(turn):
            stage = lax.rem(turn, STAGES)
            tokens = pl.ds(first_token(turn), batch)
            for half, new in enumerate((k, v)):
                if in_one_piece:
                    plgpu.copy_gmem_to_smem(new.at[tokens], new_s.at[stage, half], full.at[stage])
                    continue
                for i in range(batch):
                    plgpu.copy_gmem_to_smem(
                        new.at[first_token(turn) + i], token_at(stage, half, i), full.at[stage]
                    )

        pl.when(turns > 0)(lambda: load(jnp.int32(0)))

        def one_turn(turn, _):
            stage = lax.rem(turn, STAGES)

            @pl.when(turn + 1 < turns)
            def _next():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                load(turn + 1)

            # All of them before anything that the compiler may not move them past: one round trip to memory.
            slots = [slot_mapping[first_token(turn) + i] for i in range(batch)]
            plgpu.barrier_wait(full.at[stage])
            for i, slot in enumerate(slots):
                token = first_token(turn) + i
                ours = (token >= (cta + turn * num_ctas) * batch) & (token < live)

                @pl.when(ours & (slot >= 0) & (slot < num_blocks * block_size))
                def _write(i=i, slot=slot):
                    block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
                    for half in range(2):
                        plgpu.copy_smem_to_gmem(token_at(stage, half, i), cache.at[half, block, :, offset])

        lax.fori_loop(0, turns, one_turn, None)
        plgpu.wait_smem_to_gmem(0)

    build = functools.partial(
        plgpu.kernel,
        paged_update,
        grid=(num_ctas,),
        grid_names=("cta",),
        scratch_types=dict(
            new_s=plgpu.SMEM((STAGES, 2, batch, heads, head_size), k.dtype),
            full=plgpu.Barrier(num_arrivals=2 if in_one_piece else 2 * batch, num_barriers=STAGES),
        ),
        kernel_name="paged_update",
        interpret=interpret,
    )
    launch(
        lambda out_type: build(out_type=out_type), ("paged_update", batch, num_ctas),
        [k, v, slot_mapping, sizes], [kv_cache], batched=[0, 1, 2], interpret=interpret,
    )  # fmt: skip

"""The choice of few tokens' experts on Hopper (Mosaic GPU): from logits to the work of the experts, in one kernel.

Central idea: XLA makes ten kernels of it, each of which takes longer to launch than to run. One warpgroup has all
logits in registers, a row of them in four lanes: the best expert is found and taken out, as often as a token has
experts; then columns say who is in use, and sums over a triangle at which place. On the side it brings fewer than 8
tokens to the 8 that a product has.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.few import SMALLEST_SUM, Chosen, Rule
from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.mosaic_gpu.primitives import store

MOST_TOKENS, MOST_EXPERTS = 64, 128
"""Whose logits fit into the registers of one warpgroup."""

ALIGNED, LINE = 8, 64
"""Tokens of a product come in such portions; elements that the copy engine moves at a time."""

MOST_COPIED, MOST_LINES = 160 * 1024, 256
"""Bytes of tokens for which the logits leave room in shared memory; lines of a token in one copy."""


def supported(num_tokens: int, num_experts: int) -> str | None:
    """Why the kernel cannot choose, None when it can."""
    if num_tokens > MOST_TOKENS:
        return f"the kernel chooses for up to {MOST_TOKENS} tokens, not {num_tokens}"
    if num_experts > MOST_EXPERTS or num_experts % 64:
        return f"the kernel chooses of 64 or {MOST_EXPERTS} experts, not {num_experts}"
    return None


def choose(
    logits: jax.Array, live: jax.Array, x: jax.Array, rule: Rule, *, interpret: Any = None
) -> tuple[Chosen, jax.Array, jax.Array]:
    """What ``few.choose`` says, and the tokens in rows of a multiple of 8: what the others hold is meaningless.

    Args:
        logits: float32 [T, E].
        live: bool [T].
        x: [T, M], a type of 16 bits, M a multiple of 64.
        rule: how.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (num_tokens, num_experts), hidden_size = logits.shape, x.shape[1]
    size = 32 if num_tokens <= 32 else 64
    live = jnp.pad(live.astype(jnp.int32), (0, size - num_tokens))
    padded = -(-num_tokens // ALIGNED) * ALIGNED
    lines = None
    if padded != num_tokens:
        if num_tokens * hidden_size * x.dtype.itemsize > MOST_COPIED or hidden_size > MOST_LINES * LINE:
            x = jnp.pad(x, ((0, padded - num_tokens), (0, 0)))
        else:
            lines = num_tokens, hidden_size // LINE, LINE
    build = functools.partial(
        plgpu.kernel,
        _body(num_tokens, num_experts, size, rule, lines is not None),
        grid=(1,),
        grid_names=("cta",),
        scratch_types=dict(
            logits_s=plgpu.SMEM((size, num_experts), jnp.float32),
            up_to_s=plgpu.SMEM((num_experts,), jnp.int32),
            full=plgpu.Barrier(),
            **({} if lines is None else dict(x_s=plgpu.SMEM(lines, x.dtype), x_full=plgpu.Barrier())),
        ),
        kernel_name="choose_experts",
        interpret=interpret,
    )
    numbers = jax.ShapeDtypeStruct((num_experts,), jnp.int32)
    out_types = [jax.ShapeDtypeStruct((num_experts, size), jnp.float32), *[numbers] * 4]
    operands = [logits, live]
    if lines is not None:
        operands.append(x.reshape(lines))
        out_types.append(jax.ShapeDtypeStruct((padded, *lines[1:]), x.dtype))
    weights, used, up_to, load, zero, *rows = launch(
        lambda types: build(out_type=types), ("choose_experts", rule), operands, [], tuple(out_types),
        batched=[], interpret=interpret,
    )  # fmt: skip
    return Chosen(weights, used, up_to, zero), load, rows[0].reshape(padded, hidden_size) if rows else x


def _body(num_tokens: int, num_experts: int, size: int, rule: Rule, pads: bool) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # The tensor core's, but for single values: a transposed store has no pairs.
    tiles = ((64, 8), (16, 8), (8, 8)) if size == 64 else ((32, 8), (8, 8))
    tiling = plgpu.Tiling((*tiles, (2,), (1,)))
    warps = -8 if size == 64 else -6
    layout = plgpu.Layout.TILED(tiling, warp_dims=(warps,), lane_dims=(-4, -3), vector_dim=-1)
    rows, columns = layout.reduce(1), layout.reduce(0)
    shape = (size, num_experts)

    def over_columns(x):
        """[C] to [C, E]."""
        return lax.broadcast_in_dim(x, shape, [0])

    def over_rows(x):
        """[E] to [C, E]."""
        return lax.broadcast_in_dim(x, shape, [1])

    def filled(value, dtype):
        return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)

    def choose_experts(logits, live_tokens, *refs, logits_s, up_to_s, full, x_s=None, x_full=None):
        x, refs = (refs[0], refs[1:]) if pads else (None, refs)
        weights, used, up_to, load, zeros, *rows_out = refs
        if pads:
            plgpu.copy_gmem_to_smem(x, x_s, x_full)
        plgpu.copy_gmem_to_smem(logits, logits_s.at[pl.ds(0, num_tokens)], full)
        plgpu.barrier_wait(full)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
        expert = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        live = over_columns(plgpu.load(live_tokens, layout=rows, optimized=False)) != 0
        nothing = filled(-jnp.inf, jnp.float32)
        scores = jnp.where(live, plgpu.load(logits_s, layout=layout, optimized=False), nothing)
        left, best = scores, None
        for _ in range(rule.top_k):
            most = jnp.max(left, axis=1)
            best = most if best is None else best
            first = jnp.min(
                jnp.where(left == over_columns(most), expert, filled(num_experts, jnp.int32)), axis=1
            )
            left = jnp.where(expert == over_columns(first), nothing, left)
        chosen = live & (left == nothing)
        zero = filled(0.0, jnp.float32)
        if rule.sigmoid:
            value = 1.0 / (1.0 + jnp.exp(-scores))
        else:
            value = jnp.exp(scores - over_columns(best))
        value = jnp.where(live, value, zero)  # nothing minus nothing
        mine = jnp.where(chosen, value, zero)
        if rule.renormalize:
            value = mine / over_columns(jnp.sum(mine, axis=1) + SMALLEST_SUM)
        elif not rule.sigmoid:
            value = mine / over_columns(jnp.sum(value, axis=1) + SMALLEST_SUM)
        else:
            value = mine
        store(weights.T, value * rule.scale)

        tokens = jnp.sum(jnp.where(chosen, filled(1, jnp.int32), filled(0, jnp.int32)), axis=0)
        store(load, tokens)
        # Not tokens * 0: a constant of 64 experts cannot be stored, and the compiler finds out that it is one.
        store(zeros, jnp.minimum(tokens, 0))
        for first in range(0, num_experts, size):
            counted = (over_rows(tokens) > 0) & (expert <= row + first)
            sums = jnp.sum(jnp.where(counted, filled(1, jnp.int32), filled(0, jnp.int32)), axis=1)
            store(up_to_s.at[pl.ds(first, size)], sums)
            store(up_to.at[pl.ds(first, size)], sums)
        plgpu.commit_smem()
        ends = plgpu.load(up_to_s, layout=columns, optimized=False)
        for first in range(0, num_experts, size):
            passed = jnp.where(over_rows(ends) <= row + first, filled(1, jnp.int32), filled(0, jnp.int32))
            place = jnp.sum(passed, axis=1)
            last = plgpu.layout_cast(jnp.full((size,), num_experts - 1, jnp.int32), rows)
            store(used.at[pl.ds(first, size)], jnp.minimum(place, last))
        if pads:
            plgpu.barrier_wait(x_full)
            plgpu.copy_smem_to_gmem(x_s, rows_out[0].at[pl.ds(0, num_tokens)])
            plgpu.wait_smem_to_gmem(0)

    return choose_experts


__all__ = ["choose", "supported"]

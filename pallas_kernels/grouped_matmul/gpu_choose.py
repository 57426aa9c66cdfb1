"""The choice of few tokens' experts on Hopper (Mosaic GPU): from logits to the work of the experts, in one kernel.

Central idea: XLA makes ten kernels of it, each of which takes longer to launch than to run. Each warpgroup chooses for
16 tokens; then, together, each for a part of the experts, they count who is in use, and who is so before. On the side
it brings fewer than 8 tokens to the 8 that a product has.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul import gpu_best
from pallas_kernels.grouped_matmul.few import Chosen, Rule
from pallas_kernels.grouped_matmul.gpu_best import TOKENS
from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.mosaic_gpu.primitives import store

WARPGROUPS = 4
MOST_TOKENS = WARPGROUPS * TOKENS

ALIGNED, LINE = 8, 64
"""Tokens of a product come in such portions; elements that the copy engine moves at a time."""

MOST_COPIED, MOST_LINES = 144 * 1024, 256
"""Bytes of tokens for which logits and choices leave room in shared memory; lines of a token in one copy."""


def supported(num_tokens: int, num_experts: int) -> str | None:
    """Why the kernel cannot choose, None when it can."""
    if num_tokens > MOST_TOKENS:
        return f"the kernel chooses for up to {MOST_TOKENS} tokens, not {num_tokens}"
    return gpu_best.supported(num_experts)


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
    size = -(-num_tokens // TOKENS) * TOKENS
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
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=dict(
            logits_s=plgpu.SMEM((size, num_experts), jnp.float32),
            chosen_s=plgpu.SMEM((size, num_experts), jnp.float32),
            load_s=plgpu.SMEM((num_experts,), jnp.int32),
            up_to_s=plgpu.SMEM((num_experts,), jnp.int32),
            full=plgpu.Barrier(),
            all_done=plgpu.Barrier(num_arrivals=WARPGROUPS),
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

    layout = gpu_best.layout()
    rows, columns = layout.reduce(1), layout.reduce(0)
    part = num_experts // WARPGROUPS
    shape = (part, num_experts)

    def over_rows(x):
        """[E] to [E / 4, E]."""
        return lax.broadcast_in_dim(x, shape, [1])

    def count(condition):
        """In each row; of floats, which the compiler adds up in several sums side by side."""
        one, zero = (gpu_best.filled(shape, value, jnp.float32) for value in (1.0, 0.0))
        return jnp.sum(jnp.where(condition, one, zero), axis=1).astype(jnp.int32)

    def choose_experts(
        logits, live_tokens, *refs, logits_s, chosen_s, load_s, up_to_s, full, all_done, x_s=None, x_full=None,
    ):  # fmt: skip
        x, refs = (refs[0], refs[1:]) if pads else (None, refs)
        weights, used, up_to, load, zeros, *rows_out = refs
        warpgroup = lax.axis_index("warpgroup")
        tokens = pl.ds(pl.multiple_of(warpgroup * TOKENS, TOKENS), TOKENS)
        experts = pl.ds(pl.multiple_of(warpgroup * part, part), part)

        @pl.when(warpgroup == 0)
        def _():
            plgpu.copy_gmem_to_smem(logits, logits_s.at[pl.ds(0, num_tokens)], full)
            if pads:
                plgpu.copy_gmem_to_smem(x, x_s, x_full)

        @pl.when(warpgroup * TOKENS < size)
        def _():
            live = plgpu.load(live_tokens.at[tokens], layout=rows, optimized=False)
            live = gpu_best.over_columns(live, num_experts) != 0
            zero = gpu_best.filled((TOKENS, num_experts), 0.0, jnp.float32)
            plgpu.barrier_wait(full)
            mine = jnp.where(live, plgpu.load(logits_s.at[tokens], layout=layout, optimized=False), zero)
            best = gpu_best.best_of(mine, rule)
            scores = gpu_best.score(mine, gpu_best.over_columns(best.best, num_experts), rule)
            chosen = live & best.chosen
            store(
                weights.at[:, tokens].T, gpu_best.divided(jnp.where(chosen, scores, zero), best.divisor, rule)
            )
            one = gpu_best.filled((TOKENS, num_experts), 1.0, jnp.float32)
            # Not over the logits: how the copy engine brings those decides how the compiler swizzles their memory, and
            # with a number of tokens other than eights it then reads the transposed at other places (jax 0.11.2).
            store(chosen_s.at[tokens], jnp.where(chosen, one, zero))

        if pads:

            @pl.when(warpgroup == WARPGROUPS - 1)
            def _():
                plgpu.barrier_wait(x_full)
                plgpu.copy_smem_to_gmem(x_s, rows_out[0].at[pl.ds(0, num_tokens)])

        def wait_for_all():
            plgpu.barrier_arrive(all_done)
            plgpu.barrier_wait(all_done)

        wait_for_all()
        chosen = plgpu.load(chosen_s.at[:, experts].T, layout=layout, optimized=False)
        got = jnp.sum(chosen, axis=1).astype(jnp.int32)
        store(load_s.at[experts], got)
        store(load.at[experts], got)
        # Not got * 0: a constant of 64 experts cannot be stored, and the compiler finds out that it is one.
        store(zeros.at[experts], jnp.minimum(got, 0))
        wait_for_all()
        row = plgpu.broadcasted_iota(jnp.int32, (part,), 0, layout=rows) + warpgroup * part
        row = gpu_best.over_columns(row, num_experts)
        expert = over_rows(plgpu.broadcasted_iota(jnp.int32, (num_experts,), 0, layout=columns))
        tokens_of = over_rows(plgpu.load(load_s, layout=columns, optimized=False))
        sums = count((tokens_of > 0) & (expert <= row))
        store(up_to_s.at[experts], sums)
        store(up_to.at[experts], sums)
        wait_for_all()
        place = count(over_rows(plgpu.load(up_to_s, layout=columns, optimized=False)) <= row)
        last = gpu_best.filled((part,), num_experts - 1, jnp.int32)
        store(used.at[experts], jnp.minimum(place, last))
        if pads:
            plgpu.wait_smem_to_gmem(0)

    return choose_experts


__all__ = ["choose", "supported"]

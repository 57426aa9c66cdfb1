"""The choice of many tokens' experts on Hopper (Mosaic GPU), with what sorting the choices by expert takes.

Central idea: among the 64 tokens of a CTA, how many earlier ones chose an expert is the product of a triangle of ones
with the choices, which the tensor core does. So a choice's place among all is a sum of three small numbers, and nobody
sorts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.few import SMALLEST_SUM, Rule
from pallas_kernels.grouped_matmul.route import BLOCK, Routed
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.mosaic_gpu.primitives import store

MOST_EXPERTS = 128
"""Whose logits of a block of tokens fit into the registers of one warpgroup."""


def supported(num_tokens: int, num_experts: int) -> str | None:
    """Why the kernel cannot route, None when it can."""
    if num_tokens % BLOCK:
        return f"the kernel routes multiples of {BLOCK} tokens, not {num_tokens}"
    if num_experts > MOST_EXPERTS or num_experts % 64:
        return f"the kernel chooses of 64 or {MOST_EXPERTS} experts, not {num_experts}"
    return None


def route(logits: jax.Array, live: jax.Array, rule: Rule, *, num_sms: int, interpret: Any = None) -> Routed:
    """What ``route.route`` says.

    Args:
        logits: float32 [T, E].
        live: bool [T].
        rule: how.
        num_sms: multiprocessors to fill.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_tokens, num_experts = logits.shape
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    build = functools.partial(
        plgpu.kernel,
        _body(num_experts, num_sms, rule),
        grid=(num_sms,),
        grid_names=("cta",),
        scratch_types=dict(
            logits_s=plgpu.SMEM((BLOCK, num_experts), jnp.float32),
            triangle_s=plgpu.SMEM((BLOCK, BLOCK), jnp.bfloat16, transforms=tiled),
            chosen_s=plgpu.SMEM((BLOCK, num_experts), jnp.bfloat16, transforms=tiled),
            full=plgpu.Barrier(),
        ),
        kernel_name="route_experts",
        interpret=interpret,
    )
    num_blocks = num_tokens // BLOCK
    each = (num_blocks, rule.top_k, BLOCK)
    out_types = (
        jax.ShapeDtypeStruct(each, jnp.float32), jax.ShapeDtypeStruct(each, jnp.int32),
        jax.ShapeDtypeStruct(each, jnp.int32), jax.ShapeDtypeStruct((num_blocks, num_experts), jnp.int32),
    )  # fmt: skip
    # The kernel is lowered once for all numbers of tokens: it reads how many there are.
    operands = [jnp.full(4, num_blocks, jnp.int32), logits, live.astype(jnp.int32)]
    results = launch(
        lambda types: build(out_type=types), ("route_experts", rule, num_sms), operands, [], out_types,
        batched=[1, 2, 3, 4, 5, 6], interpret=interpret,
    )  # fmt: skip
    return Routed(*results)


def _body(num_experts: int, num_ctas: int, rule: Rule) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA
    rows = layout.reduce(1)
    shape = (BLOCK, num_experts)

    def over_columns(x):
        """[64] to [64, E]."""
        return lax.broadcast_in_dim(x, shape, [0])

    def filled(value, dtype):
        return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)

    def per_token(value, dtype):
        return plgpu.layout_cast(jnp.full((BLOCK,), value, dtype), rows)

    def route_experts(
        num_blocks,
        logits,
        live_tokens,
        weights,
        experts,
        earlier,
        counts,
        *,
        logits_s,
        triangle_s,
        chosen_s,
        full,
    ):
        cta = lax.axis_index("cta")
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis, layout=layout) for axis in range(2)
        )
        triangle_s[...] = jnp.where(column < row, 1.0, 0.0).astype(jnp.bfloat16)
        expert = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        nothing = filled(-jnp.inf, jnp.float32)

        def one_block(i, _):
            block = cta + i * num_ctas
            tokens = pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK)
            plgpu.copy_gmem_to_smem(logits.at[tokens], logits_s, full)
            is_live = plgpu.load(live_tokens.at[tokens], layout=rows, optimized=False) != 0
            plgpu.barrier_wait(full)
            left = plgpu.load(logits_s, layout=layout, optimized=False)
            left = jnp.where(over_columns(is_live.astype(jnp.int32)) != 0, left, filled(0.0, jnp.float32))
            scores, best, firsts, values, total = left, None, [], [], per_token(0.0, jnp.float32)
            for choice in range(rule.top_k):
                most = jnp.max(left, axis=1)
                best = most if best is None else best
                of_most = jnp.where(left == over_columns(most), expert, filled(num_experts, jnp.int32))
                first = jnp.min(of_most, axis=1)
                left = jnp.where(expert == over_columns(first), nothing, left)
                values.append(1.0 / (1.0 + jnp.exp(-most)) if rule.sigmoid else jnp.exp(most - best))
                firsts.append(first)
                mine = jnp.where(is_live, first, per_token(num_experts, jnp.int32))
                store(experts.at[block, choice], mine)
            if rule.renormalize:
                for value in values:
                    total = total + value
            elif not rule.sigmoid:
                total = jnp.sum(jnp.exp(scores - over_columns(best)), axis=1)
            for choice, value in enumerate(values):
                scaled = value if rule.sigmoid and not rule.renormalize else value / (total + SMALLEST_SUM)
                mine = jnp.where(is_live, scaled * rule.scale, per_token(0.0, jnp.float32))
                store(weights.at[block, choice], mine)

            dead = over_columns(is_live.astype(jnp.int32)) == 0
            chosen = jnp.where(dead | (left != nothing), filled(0.0, jnp.float32), filled(1.0, jnp.float32))
            chosen_s[...] = chosen.astype(jnp.bfloat16)
            plgpu.commit_smem()

            def products(acc):
                plgpu.wgmma(acc, triangle_s, chosen_s)
                plgpu.wgmma_wait(0)
                return acc[...]

            before = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32))
            for choice, first in enumerate(firsts):
                mine = jnp.where(expert == over_columns(first), before, filled(0.0, jnp.float32))
                store(earlier.at[block, choice], jnp.sum(mine, axis=1).astype(jnp.int32))
            # The sums' barrier is also that after which nobody reads what the next block overwrites.
            store(counts.at[block], jnp.sum(chosen, axis=0).astype(jnp.int32))

        lax.fori_loop(0, pl.cdiv(jnp.maximum(num_blocks[0] - cta, 0), num_ctas), one_block, None)

    return route_experts


@dataclass(frozen=True)
class GpuRoute:
    """The kernel; see ``dispatch.Route``. Static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        interpret: ``plgpu.InterpretGPUParams`` runs it on a CPU.
    """

    num_sms: int | None = None
    interpret: Any = None

    def why_not(self, num_tokens: int, num_experts: int) -> str | None:
        """Why the kernel cannot route, None when it can."""
        return supported(num_tokens, num_experts)

    def __call__(self, logits: jax.Array, live: jax.Array, rule: Rule) -> Routed:
        """What ``route.route`` says."""
        num_sms = multiprocessors(self.num_sms)
        return route(logits, live, rule, num_sms=num_sms, interpret=self.interpret)


__all__ = ["GpuRoute", "route", "supported"]

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
from pallas_kernels.ragged_paged_attention.gpu_launch import launch
from pallas_kernels.ragged_paged_attention.gpu_primitives import store

MOST_EXPERTS = 128
"""Whose logits of a block of tokens fit into the registers of one warpgroup."""


def supported(num_tokens: int, num_experts: int) -> str | None:
    """Why the kernel cannot route, None when it can."""
    if num_tokens % BLOCK:
        return f"the kernel routes multiples of {BLOCK} tokens, not {num_tokens}"
    if num_experts > MOST_EXPERTS or num_experts % 64:
        return f"the kernel chooses of 64 or {MOST_EXPERTS} experts, not {num_experts}"
    return None


def route(logits: jax.Array, live: jax.Array, rule: Rule, *, interpret: Any = None) -> Routed:
    """What ``route.route`` says.

    Args:
        logits: float32 [T, E].
        live: bool [T].
        rule: how.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_tokens, num_experts = logits.shape
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    build = functools.partial(
        plgpu.kernel,
        _body(num_experts, rule),
        grid=(num_tokens // BLOCK,),
        grid_names=("block",),
        scratch_types=dict(
            logits_s=plgpu.SMEM((BLOCK, num_experts), jnp.float32),
            triangle_s=plgpu.SMEM((BLOCK, BLOCK), jnp.bfloat16, transforms=tiled),
            chosen_s=plgpu.SMEM((BLOCK, num_experts), jnp.bfloat16, transforms=tiled),
            full=plgpu.Barrier(),
        ),
        kernel_name="route_experts",
        interpret=interpret,
    )
    each = (rule.top_k, num_tokens)
    out_types = (
        jax.ShapeDtypeStruct(each, jnp.float32), jax.ShapeDtypeStruct(each, jnp.int32),
        jax.ShapeDtypeStruct(each, jnp.int32), jax.ShapeDtypeStruct((num_tokens // BLOCK, num_experts), jnp.int32),
    )  # fmt: skip
    return Routed(
        *launch(
            lambda types: build(out_type=types), ("route_experts", rule), [logits, live.astype(jnp.int32)], [],
            out_types, batched=[], interpret=interpret,
        )
    )  # fmt: skip


def _body(num_experts: int, rule: Rule) -> Any:
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
        logits, live_tokens, weights, experts, earlier, counts, *, logits_s, triangle_s, chosen_s, full
    ):
        block = lax.axis_index("block")
        tokens = pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK)
        plgpu.copy_gmem_to_smem(logits.at[tokens], logits_s, full)
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis, layout=layout) for axis in range(2)
        )
        triangle_s[...] = jnp.where(column < row, 1.0, 0.0).astype(jnp.bfloat16)
        is_live = plgpu.load(live_tokens.at[tokens], layout=rows, optimized=False) != 0
        plgpu.barrier_wait(full)
        expert = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        nothing = filled(-jnp.inf, jnp.float32)
        left = plgpu.load(logits_s, layout=layout, optimized=False)
        left = jnp.where(over_columns(is_live.astype(jnp.int32)) != 0, left, filled(0.0, jnp.float32))
        scores, best, firsts, values, total = left, None, [], [], per_token(0.0, jnp.float32)
        for i in range(rule.top_k):
            most = jnp.max(left, axis=1)
            best = most if best is None else best
            first = jnp.min(
                jnp.where(left == over_columns(most), expert, filled(num_experts, jnp.int32)), axis=1
            )
            left = jnp.where(expert == over_columns(first), nothing, left)
            values.append(1.0 / (1.0 + jnp.exp(-most)) if rule.sigmoid else jnp.exp(most - best))
            firsts.append(first)
            store(experts.at[i, tokens], jnp.where(is_live, first, per_token(num_experts, jnp.int32)))
        if rule.renormalize:
            for value in values:
                total = total + value
        elif not rule.sigmoid:
            total = jnp.sum(jnp.exp(scores - over_columns(best)), axis=1)
        for i, value in enumerate(values):
            scaled = value if rule.sigmoid and not rule.renormalize else value / (total + SMALLEST_SUM)
            store(weights.at[i, tokens], jnp.where(is_live, scaled * rule.scale, per_token(0.0, jnp.float32)))

        dead = over_columns(is_live.astype(jnp.int32)) == 0
        chosen = jnp.where(dead | (left != nothing), filled(0.0, jnp.float32), filled(1.0, jnp.float32))
        chosen_s[...] = chosen.astype(jnp.bfloat16)
        plgpu.commit_smem()

        def products(acc):
            plgpu.wgmma(acc, triangle_s, chosen_s)
            plgpu.wgmma_wait(0)
            return acc[...]

        before = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32))
        for i, first in enumerate(firsts):
            mine = jnp.where(expert == over_columns(first), before, filled(0.0, jnp.float32))
            store(earlier.at[i, tokens], jnp.sum(mine, axis=1).astype(jnp.int32))
        store(counts.at[block], jnp.sum(chosen, axis=0).astype(jnp.int32))

    return route_experts


@dataclass(frozen=True)
class GpuRoute:
    """The kernel; see ``dispatch.Route``. Static in the compiled step.

    Args:
        interpret: ``plgpu.InterpretGPUParams`` runs it on a CPU.
    """

    interpret: Any = None

    def why_not(self, num_tokens: int, num_experts: int) -> str | None:
        """Why the kernel cannot route, None when it can."""
        return supported(num_tokens, num_experts)

    def __call__(self, logits: jax.Array, live: jax.Array, rule: Rule) -> Routed:
        """What ``route.route`` says."""
        return route(logits, live, rule, interpret=self.interpret)


__all__ = ["GpuRoute", "route", "supported"]

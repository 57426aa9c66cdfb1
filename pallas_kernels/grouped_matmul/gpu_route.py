"""The choice of many tokens' experts on Hopper (Mosaic GPU), with what sorting the choices by expert takes.

Central idea: among a block's tokens, how many up to each one chose an expert is the product of the choices with a
triangle of ones, which the tensor core does. So a choice's place among all is a sum of three small numbers, and nobody
sorts. Each warpgroup chooses for 16 tokens, and multiplies for 64 experts.
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

from pallas_kernels.grouped_matmul import gpu_best
from pallas_kernels.grouped_matmul.few import Rule
from pallas_kernels.grouped_matmul.gpu_best import TOKENS
from pallas_kernels.grouped_matmul.route import BLOCK, Routed
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.mosaic_gpu.primitives import store

WARPGROUPS, EXPERTS = BLOCK // TOKENS, 64
"""Of a CTA; experts that one of them multiplies for: ``gpu_best.MOST_EXPERTS`` in all."""


def supported(num_tokens: int, num_experts: int) -> str | None:
    """Why the kernel cannot route, None when it can."""
    if num_tokens % BLOCK:
        return f"the kernel routes multiples of {BLOCK} tokens, not {num_tokens}"
    return gpu_best.supported(num_experts)


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
    tiled = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(2 * BLOCK))
    build = functools.partial(
        plgpu.kernel,
        _body(num_experts, num_sms, rule),
        grid=(num_sms,),
        grid_names=("cta",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=dict(
            triangle_s=plgpu.SMEM((BLOCK, BLOCK), jnp.bfloat16, transforms=tiled),
            chosen_s=plgpu.SMEM((2, BLOCK, num_experts), jnp.bfloat16, transforms=tiled),
            all_chose=plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        kernel_name="route_experts",
        interpret=interpret,
    )
    num_blocks = num_tokens // BLOCK
    each = (num_blocks, gpu_best.rounded(rule.top_k), BLOCK)
    out_types = (
        jax.ShapeDtypeStruct(each, jnp.float32), jax.ShapeDtypeStruct(each, jnp.int32),
        jax.ShapeDtypeStruct((num_blocks, num_experts, BLOCK), jnp.float32),
        jax.ShapeDtypeStruct((num_blocks, num_experts), jnp.int32),
    )  # fmt: skip
    # The kernel is lowered once for all numbers of tokens: it reads how many there are.
    operands = [jnp.full(4, num_blocks, jnp.int32), logits, live.astype(jnp.int32)]
    weights, experts, *counted = launch(
        lambda types: build(out_type=types), ("route_experts", rule, num_sms), operands, [], out_types,
        batched=[1, 2, 3, 4, 5, 6], interpret=interpret,
    )  # fmt: skip
    return Routed(weights[:, : rule.top_k], experts[:, : rule.top_k], *counted)


def _body(num_experts: int, num_ctas: int, rule: Rule) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = gpu_best.layout()

    def route_experts(
        num_blocks, logits, live_tokens, weights, experts, so_far, counts, *, triangle_s, chosen_s, all_chose
    ):
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        mine = pl.ds(pl.multiple_of(warpgroup * TOKENS, TOKENS), TOKENS)
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, (TOKENS, BLOCK), axis, layout=layout) for axis in range(2)
        )
        store(
            triangle_s.at[mine], jnp.where(row + warpgroup * TOKENS <= column, 1.0, 0.0).astype(jnp.bfloat16)
        )

        def one_block(i, _):
            block = cta + i * num_ctas
            now_s = chosen_s.at[lax.rem(i, 2)]
            tokens = pl.ds(pl.multiple_of(block * BLOCK + warpgroup * TOKENS, TOKENS), TOKENS)
            live = plgpu.load(live_tokens.at[tokens], layout=layout.reduce(1), optimized=False)
            of_mine = plgpu.load(logits.at[tokens], layout=layout, optimized=False)

            def where_live(x, otherwise):
                is_live = gpu_best.over_columns(live, x.shape[1]) != 0
                return jnp.where(is_live, x, gpu_best.filled(x.shape, otherwise, x.dtype))

            best = gpu_best.best_of(where_live(of_mine, 0.0), rule)
            ones = gpu_best.filled((TOKENS, num_experts), 1.0, jnp.float32)
            zeros = gpu_best.filled((TOKENS, num_experts), 0.0, jnp.float32)
            store(now_s.at[mine], where_live(jnp.where(best.chosen, ones, zeros), 0.0).astype(jnp.bfloat16))
            plgpu.commit_smem()
            plgpu.barrier_arrive(all_chose)
            store(experts.at[block, :, mine].T, where_live(best.experts, num_experts))
            store(weights.at[block, :, mine].T, where_live(best.weights, 0.0))
            # After it nobody is at the block before any more, whose place the next one takes.
            plgpu.barrier_wait(all_chose)

            def count():
                these = pl.ds(pl.multiple_of(warpgroup * EXPERTS, EXPERTS), EXPERTS)

                def product(acc):
                    plgpu.wgmma(acc, now_s.at[:, these].T, triangle_s)
                    plgpu.wgmma_wait(0)
                    return acc[...]

                sums = pl.run_scoped(product, plgpu.ACC((EXPERTS, BLOCK), jnp.float32))
                store(so_far.at[block, these], sums)
                store(counts.at[block, these], jnp.max(sums, axis=1).astype(jnp.int32))

            pl.when(warpgroup * EXPERTS < num_experts)(count)

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

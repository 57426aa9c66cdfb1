"""Experts of few tokens on Hopper (Mosaic GPU): every token through every expert in use, in two kernels.

Central ideas:

* With few tokens the time is that of reading the weights. So all tokens are the columns of every product, whether they
  chose the expert or not: nothing is sorted, gathered or scattered. A token's weight at an expert, zero where it did
  not choose it, scales the expert's hidden values.
* The first kernel computes gate and up of the same outputs in one warpgroup, which leaves silu(gate) * up * weight.
* The second one's contracted dimension is that of all experts in use, one after another. It is cut into equal parts,
  as many as there are multiprocessors for; their sums are added by whoever adds the residual.

Sums depend on which experts the batch uses: not for batch-invariant engines.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.few import Chosen
from pallas_kernels.grouped_matmul.gpu_few_case import ALIGNED, Case, scratch
from pallas_kernels.grouped_matmul.gpu_few_kernel import both_body, down_body, gate_up_body
from pallas_kernels.grouped_matmul.gpu_few_tuning import FewConfig
from pallas_kernels.mosaic_gpu.launch import launch


def gated_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    chosen: Chosen,
    *,
    configs: tuple[FewConfig, FewConfig] | FewConfig,
    num_sms: int,
    interpret: Any = None,
) -> jax.Array:
    """float32 [T, M]; as ``few.gated_mlp``.

    Args:
        x: [T, M], bfloat16 or float16.
        gate_up: [E, 2, F, M] of the same type; F and M multiples of 64.
        down: [E, M, F].
        chosen: the experts.
        configs: of the two kernels, or of one that is both.
        num_sms: multiprocessors to fill.
    """
    num_tokens = x.shape[0]
    columns = -(-num_tokens // ALIGNED) * ALIGNED
    if columns != num_tokens:
        x = jnp.pad(x, ((0, columns - num_tokens), (0, 0)))
    if isinstance(configs, FewConfig):
        parts = _run_both(x, gate_up, down, chosen, configs, columns, num_sms, interpret)
    else:
        parts = _run_each(x, gate_up, down, chosen, configs, columns, num_sms, interpret)
    # Added one by one, not as a reduction: so XLA makes it a part of what comes next.
    return functools.reduce(jnp.add, [part[:num_tokens] for part in parts])


def _run_each(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: Chosen, configs: tuple[FewConfig, FewConfig],
    columns: int, num_sms: int, interpret: Any,
) -> jax.Array:  # fmt: skip
    """float32 [parts, C, M]."""
    num_experts, _, ffn, hidden_size = gate_up.shape
    first = Case(configs[0], columns, num_experts, 2, ffn, hidden_size, num_sms)
    second = Case(configs[1], columns, num_experts, 1, hidden_size, ffn, num_sms)
    plan = [chosen.used, chosen.up_to]
    body, out_type = (
        gate_up_body(first, x.dtype),
        jax.ShapeDtypeStruct((num_experts * columns, ffn), x.dtype),
    )
    [hidden] = _run(
        first, "experts_gate_up", body, [*plan, x, chosen.weights, gate_up], [], (out_type,), interpret
    )
    body, out_type = (
        down_body(second),
        jax.ShapeDtypeStruct((second.splits, columns, hidden_size), jnp.float32),
    )
    [parts] = _run(second, "experts_down", body, [*plan, hidden, down], [], (out_type,), interpret)
    return parts


def _run_both(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: Chosen, config: FewConfig,
    columns: int, num_sms: int, interpret: Any,
) -> jax.Array:  # fmt: skip
    """float32 [parts, C, M]."""
    num_experts, _, ffn, hidden_size = gate_up.shape
    first = Case(config, columns, num_experts, 2, ffn, hidden_size, num_sms)
    # As many products: the same shared memory and barriers serve both parts.
    config = replace(config, blocks=2 * config.blocks)
    second = Case(config, columns, num_experts, 1, hidden_size, ffn, num_sms)
    if (first.step, first.stages) != (second.step, second.stages):
        raise ValueError(
            f"a step of {config.step} does not divide {hidden_size} and {ffn}: take a smaller one"
        )
    if second.output_tiles > num_sms:
        raise ValueError(
            f"{second.output_tiles} tiles of outputs cannot all run on {num_sms} multiprocessors"
        )
    operands = [chosen.used, chosen.up_to, x, chosen.weights, gate_up, down]
    out_types = (
        jax.ShapeDtypeStruct((num_experts * columns, ffn), x.dtype),
        jax.ShapeDtypeStruct((second.splits, columns, hidden_size), jnp.float32),
    )
    body = both_body(first, second, x.dtype, alone=interpret is not None)
    arrived = jax.new_ref(chosen.zero)
    _, parts = _run(first, "experts_both", body, operands, [arrived], out_types, interpret)
    return parts


def _run(
    case: Case, name: str, body: Any, operands: list[jax.Array], refs: list[Any],
    out_types: tuple[jax.ShapeDtypeStruct, ...], interpret: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    dtype, warpgroups = operands[2].dtype, case.config.consumers + 1
    counts = {}
    if refs:
        counts = dict(
            count_s=plgpu.SMEM((warpgroups, 1), jnp.int32), ready=plgpu.Barrier(num_arrivals=warpgroups - 1)
        )
    build = functools.partial(
        plgpu.kernel,
        body,
        grid=(case.grid,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types={**scratch(case, dtype), **counts},
        kernel_name=name,
        interpret=interpret,
    )
    return launch(
        lambda types: build(out_type=types), (name, case, dtype.name), operands, refs, out_types,
        batched=[], interpret=interpret,
    )  # fmt: skip

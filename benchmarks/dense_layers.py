"""The section ``dense_layers`` of kernels.py: decode layers of Llama 8B as a whole, with our products and with XLA's.

Norm, qkv, attention over 1,024 cached tokens a row (our kernel), out and residual, norm, gate and up, down and
residual: what the products save beside their own time shows here. The time is that of a layer, from the first kernel's
start to the last one's end. Ours are the products that the tuning table gives to the kernel, for so many rows; XLA has
the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS = (8, 64, 128)
CONTEXT, BLOCK = 1024, 64
HEADS, KV_HEADS, HEAD_SIZE, HIDDEN, FFN = 32, 8, 128, 4096, 14336
LAYERS = 4


@dataclass(frozen=True)
class Products:
    """How a layer's products are computed.

    Args:
        multiply: (x, weight, what follows), ours or XLA's.
    """

    name: str
    multiply: Callable[..., Any]


def products(tools: Any, rows: int) -> list[Products]:
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

    jax, jnp = tools.jax, tools.jnp

    def xla(x: Any, weight: Any, *, residual: Any = None, gated: bool = False) -> Any:
        y = jnp.einsum("tk,nk->tn", x, weight, preferred_element_type=x.dtype)
        if gated:
            gate, up = jnp.split(y.astype(jnp.float32), 2, axis=1)
            y = (jax.nn.silu(gate) * up).astype(x.dtype)
        return y if residual is None else residual + y

    kernel = GpuDenseMatmul()

    def ours(x: Any, weight: Any, **kind: Any) -> Any:
        gated = kind.get("gated", False)
        left = kernel.why_not(rows, *weight.shape, weight.dtype, gated=gated) is not None
        return (xla if left else kernel)(x, weight, **kind)

    found = [Products("ours", ours)]
    return found if tools.ours_only else [Products("xla", xla), *found]


def run(tools: Any, emit: Callable[..., None], profiled: Callable[..., float]) -> None:
    """Time every way.

    Args:
        profiled: (run, layers) to us of a layer.
    """
    from pallas_kernels.ragged_paged_attention.options import AttentionOptions

    jax, jnp = tools.jax, tools.jnp
    shapes = (6144, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)
    options = AttentionOptions(scale=HEAD_SIZE**-0.5)
    sizes = dict(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE)

    def norm(h: Any) -> Any:
        wide = h.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(h.dtype)

    def program(multiply: Callable[..., Any]) -> Callable[..., Any]:
        def decode(h: Any, weights: Any, caches: Any, metadata: Any) -> Any:
            plan = tools.tuned.prepare(metadata, options, num_tokens=h.shape[0], **sizes)
            kept = []
            for (qkv, out, gate_up, down), cache in zip(weights, caches, strict=True):
                y = multiply(norm(h), qkv).reshape(h.shape[0], -1, HEAD_SIZE)
                q, k, v = jnp.split(y, (HEADS, HEADS + KV_HEADS), axis=1)
                attended, cache = tools.tuned.update_and_attend(q, k, v, cache, metadata, options, None, plan)
                kept.append(cache)
                h = multiply(attended.reshape(h.shape[0], -1), out, residual=h)
                y = multiply(norm(h), gate_up, gated=True)
                h = multiply(y, down, residual=h)
            return h, kept

        return jax.jit(decode, donate_argnums=2)

    def abstract(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    shard, shards = map(int, os.environ.get("KERNELS_SHARD", "0/1").split("/"))
    ready = []
    for rows in ROWS[shard::shards]:
        metadata, num_blocks, _ = tools.batch([(CONTEXT, 1)] * rows, block_size=BLOCK)
        cache = tools.tuned.kv_cache_shape(num_blocks, BLOCK, KV_HEADS, HEAD_SIZE)
        inputs = abstract(rows, HIDDEN), [[abstract(*each) for each in shapes]] * LAYERS
        ways = []
        for way in products(tools, rows):
            try:
                lowered = program(way.multiply).lower(*inputs, [abstract(*cache)] * LAYERS, metadata)
                ways.append((way.name, lowered.compile()))
            except Exception as error:
                print(f"# 8b layer x {rows} {way.name}: {type(error).__name__}: {str(error)[:300]}")
                emit(section="dense_layers", name=f"8b layer x {rows}", path=way.name, wrong=True)
        ready.append((rows, metadata, cache, ways))
    tools.await_turn()
    weights = [[tools.random(*shape) * shape[1] ** -0.5 for shape in shapes] for _ in range(LAYERS)]
    for rows, metadata, cache, ways in ready:
        h = tools.random(rows, HIDDEN)
        caches = [tools.random(*cache) for _ in range(LAYERS)]
        time_ways(emit, profiled, ways, h, weights, caches, metadata)
        del caches


def time_ways(
    emit: Callable[..., None], profiled: Callable[..., float], ways: list[tuple[str, Any]], h: Any, weights: Any,
    caches: Any, metadata: Any,
) -> None:  # fmt: skip
    """Time each way of computing the same layers, and compare its result with the first one's."""
    rows, first, state = h.shape[0], None, [caches]
    moved = sum(weight.nbytes for weight in weights[0]) + rows * CONTEXT * KV_HEADS * HEAD_SIZE * 4
    for name, call in ways:

        def step(call: Any = call) -> Any:
            out, state[0] = call(h, weights, state[0], metadata)
            return out

        found = np.asarray(step(), np.float32)
        us = profiled(step, LAYERS)
        first = found if first is None else first
        emit(
            section="dense_layers", name=f"8b layer x {rows}", path=name, unit="TB/s", rate=moved / us / 1e6,
            kernel_us=us, layer_us=us, error=round(float(np.abs(found - first).max() / np.abs(first).max()), 4),
        )  # fmt: skip


__all__ = ["run"]

"""The kernel that norms, rotates and parts heads beside XLA's, on a Hopper GPU: errors, and us a layer.

    python benchmarks/split_heads.py

A layer's time is that of as many calls in one program as the model has layers, each on the result of the one before.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.rope import RopeAngles
from pallas_kernels.rms_norm.dispatch import PLAIN
from pallas_kernels.split_heads import gpu

LAYERS = 28
SHAPES = {"qwen3-0.6b": (8, 2, True), "llama-8b": (8, 4, False), "qwen3-30b-a3b": (4, 8, True)}
"""KV heads, query heads of each, whether they are normalised."""


def plain(qkv: jax.Array, rope: RopeAngles, weights: jax.Array | None) -> tuple[jax.Array, ...]:
    qk = qkv[:, :, :-1]
    qk = rope.rotate(qk if weights is None else PLAIN(qk, weights, 1e-6))
    return qk[:, :, :-1].reshape(qkv.shape[0], -1, 128), qk[:, :, -1], qkv[:, :, -1]


def layers(split: Callable[..., tuple[jax.Array, ...]]) -> Any:
    """A program of that many layers."""

    def run(qkv: jax.Array, rope: RopeAngles, weights: jax.Array | None) -> jax.Array:
        for _ in range(LAYERS):
            q, k, v = jax.lax.optimization_barrier(split(qkv, rope, weights))
            q = q.reshape(*qkv.shape[:2], -1, 128)
            qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)
        return qkv

    return jax.jit(run)


def seconds(program: Any, *arguments: Any) -> float:
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(5):
            result = program(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / 5)
    return statistics.median(times)


def main() -> None:
    rng = np.random.default_rng(0)
    kernel = gpu.GpuSplitHeads()

    def ours(qkv: jax.Array, rope: RopeAngles, weights: jax.Array | None) -> tuple[jax.Array, ...]:
        return kernel(qkv, rope.cos[:, 0, 0], rope.sin[:, 0, 0], weights, 1e-6)

    for name, (kv_heads, group, norm) in SHAPES.items():
        for rows in (1, 8, 32, 64, 128, 256, 512):
            qkv = jnp.asarray(rng.normal(size=(rows, kv_heads, group + 2, 128)), jnp.bfloat16)
            frequencies = (1e6 ** (-np.arange(64) / 64)).astype(np.float32)
            rope = RopeAngles.at(jnp.asarray(rng.integers(0, 4000, rows), jnp.int32), frequencies, 1.0)
            scale = jnp.asarray(1 + 0.1 * rng.normal(size=(2, 128)), jnp.bfloat16)
            weights = jnp.concatenate([jnp.repeat(scale[:1], group, axis=0), scale[1:]]) if norm else None
            pairs = zip(jax.jit(ours)(qkv, rope, weights), jax.jit(plain)(qkv, rope, weights), strict=True)
            error = max(
                float(jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)))) for a, b in pairs
            )
            times = [1e6 * seconds(layers(split), qkv, rope, weights) / LAYERS for split in (ours, plain)]
            print(
                f"{name:14s} {rows:4d} rows: error {error:.4f}, ours {times[0]:6.2f} us, XLA {times[1]:6.2f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()

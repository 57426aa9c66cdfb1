"""Kernels that overlap on a Hopper GPU: the same bits as one after another, launched singly and as a CUDA graph."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic_gpu import overlap


def is_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]

WIDTH, INNER, LAYERS = 2048, 4096, 12
SINGLY = {"xla_gpu_graph_min_graph_size": 1 << 30, "xla_gpu_enable_pdl_launch": True}


def layers(x: jax.Array, up: jax.Array, down: jax.Array, scale: jax.Array) -> jax.Array:
    """Norm, a gated product and one that a residual joins, again and again: each reads what the one before wrote."""
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul
    from pallas_kernels.rms_norm.gpu import GpuRMSNorm

    multiply, norm = GpuDenseMatmul(always=True), GpuRMSNorm()
    for layer in range(LAYERS):
        wide = multiply(norm(x, scale, 1e-5), up[layer], gated=True)
        x = multiply(wide, down[layer], residual=x)
    return x


def outputs(operands: list[list[Any]], options: dict[str, Any]) -> list[np.ndarray]:
    jax.clear_caches()  # of what was traced with other kernels
    program = jax.jit(layers).lower(*operands[0]).compile(options)
    # All of them are on their way before the first is looked at.
    return [np.asarray(each, np.float32) for each in [program(*each) for each in operands]]


@pytest.mark.parametrize("rows", [1, 8, 64, 128])
def test_overlap_changes_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(rows)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5, jnp.bfloat16)

    weights = [draw(LAYERS, 2 * INNER, WIDTH), draw(LAYERS, WIDTH, INNER), jnp.ones(WIDTH, jnp.bfloat16)]
    operands = [[draw(rows, WIDTH) * 40, *weights] for _ in range(20)]
    expected = outputs(operands, {})
    assert all(np.isfinite(each).all() for each in expected)
    monkeypatch.setattr(overlap, "enabled", True)
    for options in ({}, SINGLY):
        found = outputs(operands, options)
        np.testing.assert_array_equal(found, expected)
    jax.clear_caches()

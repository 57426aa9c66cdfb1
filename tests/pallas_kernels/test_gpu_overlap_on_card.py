"""Kernels that overlap on a Hopper GPU: the same bits as one after another, launched singly and as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runner.programs import LAUNCHED
from pallas_kernels.mosaic_gpu import overlap


def is_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]

WIDTH, INNER, LAYERS, RUNS = 2048, 4096, 12, 20


@pytest.fixture(autouse=True)
def clear_caches() -> Iterator[None]:
    """Of what was traced with other kernels."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def layers(x: jax.Array, weights: list[Any], scale: jax.Array, *, all_rows: bool) -> jax.Array:
    """Norm, a gated product and one that a residual joins, again and again: each reads what the one before wrote. Every
    third layer is followed by a kernel of XLA's that does so too."""
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul
    from pallas_kernels.rms_norm.gpu import GpuRMSNorm

    multiply, norm = GpuDenseMatmul(always=True), GpuRMSNorm()
    if all_rows:
        multiply = multiply.for_all_rows()
    for layer, (up, down) in enumerate(weights):
        wide = multiply(norm(x, scale, 1e-5), up, gated=True)
        x = multiply(wide, down, residual=x)
        if layer % 3 == 0:
            x = jax.lax.optimization_barrier(x + jnp.roll(x, 1, axis=0))
    return x


def outputs(operands: list[tuple[Any, ...]], options: dict[str, Any], *, all_rows: bool) -> list[np.ndarray]:
    jax.clear_caches()
    program = jax.jit(layers, static_argnames="all_rows")
    compiled = program.lower(*operands[0], all_rows=all_rows).compile(options)
    # All of them are on their way before the first is looked at.
    return [np.asarray(each, np.float32) for each in [compiled(*each) for each in operands]]


@pytest.mark.parametrize(
    ("rows", "all_rows"), [(1, False), (8, False), (64, False), (128, True), (512, True)]
)
def test_overlap_changes_no_bit(rows: int, all_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(rows)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5, jnp.bfloat16)

    weights = [(draw(2 * INNER, WIDTH), draw(WIDTH, INNER)) for _ in range(LAYERS)]
    operands = [(draw(rows, WIDTH) * 40, weights, jnp.ones(WIDTH, jnp.bfloat16)) for _ in range(RUNS)]
    expected = outputs(operands, {}, all_rows=all_rows)
    assert all(np.isfinite(each).all() for each in expected)
    monkeypatch.setattr(overlap, "enabled", True)
    for options in ({"xla_gpu_enable_pdl_launch": False}, dict(LAUNCHED)):
        np.testing.assert_array_equal(outputs(operands, options, all_rows=all_rows), expected)

"""Hopper kernels that overlap: they say so to the runtime only where that is on, and weights come before they wait."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from gpu_interpreter import needs_mosaic_gpu

from pallas_kernels.mosaic_gpu import launch, overlap

pytestmark = [pytest.mark.device, needs_mosaic_gpu]


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

    return GpuDenseMatmul(4, always=True)(x, weight)


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    from pallas_kernels.rms_norm.gpu import GpuRMSNorm

    return GpuRMSNorm(4)(x, weight[:, 0], 1e-5)


def heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    from pallas_kernels.split_heads.gpu import GpuSplitHeads

    angles = jnp.ones((4, 64))
    return GpuSplitHeads(4)(x.reshape(4, 1, 4, 128), angles, angles, None, 1e-5)[0]


def lowered(function: Callable[..., jax.Array], monkeypatch: pytest.MonkeyPatch) -> list[launch.KernelModule]:
    """The kernels of it."""
    modules: list[launch.KernelModule] = []
    lower = launch._lower

    def note(*arguments):
        modules.append(lower(*arguments))
        return modules[-1]

    jax.clear_caches()
    monkeypatch.setattr(launch, "_modules", launch._ModuleCache())
    monkeypatch.setattr(launch, "_lower", note)
    x, weight = jnp.ones((8, 256), jnp.bfloat16), jnp.ones((256, 256), jnp.bfloat16)
    jax.jit(function).trace(x, weight).lower(lowering_platforms=("cuda",))
    monkeypatch.setattr(launch, "_lower", lower)
    return modules


@pytest.mark.parametrize("function", [product, norm, heads], ids=lambda each: each.__name__)
def test_the_runtime_is_told_only_where_it_is_on(function, monkeypatch):
    [plain] = lowered(function, monkeypatch)
    monkeypatch.setattr(overlap, "enabled", True)
    [early] = lowered(function, monkeypatch)
    told = [b"uses_pdl" in bytes(dict(each.attributes)["module"]) for each in (plain, early)]
    assert told == [False, True]
    jax.clear_caches()  # of what was traced with it


def test_kernels_of_both_kinds_are_kept_apart(monkeypatch):
    lowered(norm, monkeypatch)
    kept = launch._modules
    jax.clear_caches()
    monkeypatch.setattr(overlap, "enabled", True)
    x, weight = jnp.ones((8, 256), jnp.bfloat16), jnp.ones((256, 256), jnp.bfloat16)
    jax.jit(norm).trace(x, weight).lower(lowering_platforms=("cuda",))
    assert len(kept._modules) == 2
    jax.clear_caches()


@pytest.mark.parametrize(("rows", "kernels"), [(8, 1), (257, 0)])
def test_norms_of_few_rows_are_kernels_that_overlap(rows, kernels, monkeypatch):
    """XLA's own would keep the next kernel from beginning."""
    from pallas_kernels.rms_norm import dispatch, gpu

    monkeypatch.setattr(dispatch, "hopper_why_not", lambda _: None)
    monkeypatch.setattr(gpu, "multiprocessors", lambda _: 4)

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return dispatch.PLAIN(jnp.tile(x, (rows // 8 + 1, 1))[:rows], weight[:, 0], 1e-5)

    assert len(lowered(norm, monkeypatch)) == 0
    monkeypatch.setattr(overlap, "enabled", True)
    assert len(lowered(norm, monkeypatch)) == kernels
    jax.clear_caches()

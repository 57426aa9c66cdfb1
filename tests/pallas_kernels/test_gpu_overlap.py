"""Hopper kernels that overlap: every one of a decode step says so to the runtime, and only where that is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_gpu_launch
from gpu_interpreter import needs_mosaic_gpu

from pallas_kernels.grouped_matmul.few import Rule
from pallas_kernels.mosaic_gpu import launch, overlap

pytestmark = [pytest.mark.device, needs_mosaic_gpu]


@pytest.fixture(autouse=True)
def clear_caches() -> Iterator[None]:
    """Of what was traced with kernels that overlap."""
    yield
    jax.clear_caches()


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(function: Callable[..., Any], *operands: jax.ShapeDtypeStruct) -> None:
    jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))


def product() -> None:
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

    lower(GpuDenseMatmul(4, always=True), array(8, 256), array(256, 256))


def norm() -> None:
    from pallas_kernels.rms_norm.gpu import GpuRMSNorm

    lower(lambda x, weight: GpuRMSNorm(4)(x, weight, 1e-5), array(8, 256), array(256))


def sum_and_norm() -> None:
    from pallas_kernels.rms_norm.gpu import GpuAddNorm

    rows = array(1, 256)
    lower(lambda *each: GpuAddNorm()(*each, 1e-5), rows, rows, array(2, 256), array(1, dtype=jnp.int32))


def heads() -> None:
    from pallas_kernels.split_heads.gpu import GpuSplitHeads

    angles = array(4, 64, dtype=jnp.float32)
    lower(lambda *each: GpuSplitHeads(4)(*each, None, 1e-5), array(4, 1, 4, 128), angles, angles)


def attention() -> None:
    test_gpu_launch.lowered(8, 8, decode_only=True)


def few_tokens() -> None:
    """Choice and both products."""
    from pallas_kernels.grouped_matmul.gpu_few import GpuFewTokens

    lower(
        lambda *each: GpuFewTokens(132).routed(*each[:3], Rule(2), *each[3:]),
        array(8, 256), array(8, 64, dtype=jnp.float32), array(8, dtype=jnp.bool_), array(64, 2, 128, 256),
        array(64, 256, 128),
    )  # fmt: skip


def many_tokens() -> None:
    """Choice and a product."""
    from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul
    from pallas_kernels.grouped_matmul.gpu_route import GpuRoute

    logits, live = array(128, 64, dtype=jnp.float32), array(128, dtype=jnp.bool_)
    lower(lambda *each: GpuRoute(4)(*each, Rule(2)), logits, live)
    lower(GpuGroupedMatmul(4), array(256, 256), array(64, 128, 256), array(64, dtype=jnp.int32))


def kernels_of(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[launch.KernelModule]:
    """Those that it launches, lowered anew."""
    modules: list[launch.KernelModule] = []
    lower_one = launch._lower

    def note(*arguments: Any) -> launch.KernelModule:
        modules.append(lower_one(*arguments))
        return modules[-1]

    jax.clear_caches()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "_modules", launch._ModuleCache())
        patch.setattr(launch, "_lower", note)
        run()
    return modules


STEP = {product: 1, norm: 1, sum_and_norm: 1, heads: 1, attention: 1, few_tokens: 3, many_tokens: 2}
"""What a decode step is made of -> its kernels."""


@pytest.mark.parametrize("run", STEP, ids=lambda each: each.__name__)
def test_the_runtime_is_told_only_where_it_is_on(run, monkeypatch):
    told: list[set[bool]] = []
    for enabled in (False, True):
        monkeypatch.setattr(overlap, "enabled", enabled)
        found = kernels_of(run, monkeypatch)
        assert len(found) == STEP[run]
        told.append({b"uses_pdl" in bytes(dict(each.attributes)["module"]) for each in found})
    assert told == [{False}, {True}]


def test_kernels_of_both_kinds_are_kept_apart(monkeypatch):
    kept = launch._ModuleCache()
    monkeypatch.setattr(launch, "_modules", kept)
    for enabled in (False, True):
        monkeypatch.setattr(overlap, "enabled", enabled)
        jax.clear_caches()
        norm()
    assert len(kept._modules) == 2

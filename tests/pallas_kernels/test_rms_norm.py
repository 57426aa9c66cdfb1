"""Norms whose bits do not depend on the number of rows, against the plain one and against themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import needs_mosaic_gpu, run, strict, unexpected_races

from pallas_kernels.rms_norm.dispatch import PLAIN, FittingNorm, HalvesNorm, OnesNorm, fixed_norm, halved

pytestmark = pytest.mark.device
EPS = 1e-5


def operands(*shape: int, dtype: str = "bfloat16") -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(shape[0])
    return jnp.asarray(rng.standard_normal(shape) * 3, dtype), jnp.asarray(
        rng.standard_normal(shape[-1]), dtype
    )


@pytest.mark.parametrize("norm", [OnesNorm(), HalvesNorm()])
@pytest.mark.parametrize("shape", [(5, 1), (3, 9), (4, 2, 3, 16), (6, 576)])
def test_another_order_of_the_same_sum(norm, shape):
    x, weight = operands(*shape, dtype="float32")
    np.testing.assert_allclose(norm(x, weight, EPS), PLAIN(x, weight, EPS), rtol=2e-6)


@pytest.mark.parametrize("size", [1, 2, 7, 100, 576])
def test_halves_are_added_in_the_order_they_say(size):
    values = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    expected = values
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        added = expected[:, :half] + expected[:, half : 2 * half]
        expected = np.concatenate([added, expected[:, 2 * half :]], axis=1)
    np.testing.assert_array_equal(jax.jit(halved)(values), expected)


@needs_mosaic_gpu
@pytest.mark.parametrize("rows,size", [(1, 128), (5, 384), (7, 1024)])
def test_kernel(rows, size, capsys):
    from pallas_kernels.rms_norm.gpu import GpuRMSNorm

    x, weight = operands(rows, size)
    norm = GpuRMSNorm(num_sms=1, ctas_per_sm=3, interpret=strict())
    found = run(lambda x, weight: norm(x, weight, EPS), x, weight)
    expected = np.asarray(PLAIN(x, weight, EPS), np.float32)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=1 / 64)
    assert not unexpected_races(capsys.readouterr().out)


@needs_mosaic_gpu
@pytest.mark.parametrize("rows,size", [(1, 128), (3, 1024)])
def test_sum_and_norm(rows, size, capsys):
    from pallas_kernels.rms_norm.gpu import GpuAddNorm

    partial, weight = operands(rows, size)
    residual = operands(rows + 1, size)[0][:rows]
    kernel, weights = GpuAddNorm(interpret=strict()), jnp.stack([-weight, weight])
    total, normal = run(lambda *a: kernel(*a, EPS), partial, residual, weights, jnp.ones(1, jnp.int32))
    np.testing.assert_array_equal(np.asarray(total), np.asarray(partial + residual))
    expected = np.asarray(PLAIN(partial + residual, weight, EPS), np.float32)
    np.testing.assert_allclose(np.asarray(normal, np.float32), expected, rtol=1 / 64)
    assert not unexpected_races(capsys.readouterr().out)
    assert kernel.why_not(8, size, partial.dtype) is not None


@needs_mosaic_gpu
def test_one_kernel_serves_all_numbers_of_rows():
    """But for how many CTAs are started: few rows start few of the same code."""
    from pallas_kernels.rms_norm.gpu import GpuRMSNorm

    def lowered(rows: int) -> str:
        array = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
        norm = jax.jit(lambda x, weight: GpuRMSNorm(num_sms=132)(x, weight, EPS))
        text = norm.trace(*array).lower(lowering_platforms=("cuda",)).as_text()
        return text.split('kernel_hash = "')[1].split('"')[0]

    assert lowered(8) == lowered(64) == lowered(264)
    assert lowered(512) == lowered(8192)


@needs_mosaic_gpu
@pytest.mark.parametrize("rows", [1, 7])
def test_sum_and_norm_lower(rows):
    from pallas_kernels.rms_norm.gpu import GpuAddNorm

    array = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    weights, layer = jax.ShapeDtypeStruct((32, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = jax.jit(lambda *a: GpuAddNorm()(*a, EPS)).trace(array, array, weights, layer)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


@needs_mosaic_gpu
def test_what_the_kernel_does_not_take_is_halved():
    norm = fixed_norm("gpu", 132)
    assert isinstance(norm, FittingNorm)
    for size, dtype in ((576, "bfloat16"), (128, "float32"), (1 << 15, "bfloat16")):
        assert norm.kernel.why_not(size, dtype) is not None
    assert norm.kernel.why_not(4096, "float16") is None
    x, weight = operands(3, 576)
    np.testing.assert_array_equal(
        np.asarray(norm(x, weight, EPS), np.float32), np.asarray(HalvesNorm()(x, weight, EPS), np.float32)
    )
    assert fixed_norm("gpu", kernel=False) == fixed_norm("tpu") == HalvesNorm()
    assert fixed_norm("cpu") == OnesNorm()

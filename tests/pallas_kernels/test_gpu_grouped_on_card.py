"""Hopper's grouped matmul on a Hopper GPU against the oracle: ``JAX_PLATFORMS=cuda pytest -m gpu``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.gated import gated
from pallas_kernels.grouped_matmul.reference import grouped_matmul


def is_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]

SIZES = {
    "few, shared eights": (64, [1, 0, 3, 5, 0, 9, 2, 17]),
    "fewer than a tile": (5, [0, 2, 0, 0, 1, 0, 0, 0]),
    "nothing": (64, [0] * 8),
    "one huge group": (3000, [0, 2999, 0, 0, 0, 0, 0, 0]),
    "many": (2100, [250, 263, 0, 1, 700, 256, 8, 333]),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (2880, 320)], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_equals_the_oracle(name, shape, dtype):
    from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

    (num_rows, sizes), (outputs, inner) = SIZES[name], shape
    rng = np.random.default_rng(0)
    live = np.arange(num_rows)[:, None] < sum(sizes)
    lhs = jnp.asarray(np.where(live, rng.standard_normal((num_rows, inner)), np.nan), dtype)
    rhs = jnp.asarray(rng.standard_normal((len(sizes), outputs, inner)), dtype)
    group_sizes = jnp.asarray(sizes, jnp.int32)
    expected = np.asarray(grouped_matmul(jnp.nan_to_num(lhs), rhs, group_sizes))
    multiply = jax.jit(GpuGroupedMatmul())
    for _ in range(3):
        found = np.asarray(multiply(lhs, rhs, group_sizes), np.float32)
        np.testing.assert_array_equal(found[sum(sizes) :], 0)
        assert np.abs(found - expected).max() < 0.03 * inner**0.5


def test_gate_and_up_in_one_kernel():
    from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

    num_rows, sizes = SIZES["many"]
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((num_rows, 2048)), "bfloat16")
    gate_up = jnp.asarray(rng.standard_normal((len(sizes), 2, 768, 2048)) / 32, "bfloat16")
    operands = lhs, gate_up, jnp.asarray(sizes, jnp.int32)
    found = np.asarray(jax.jit(GpuGroupedMatmul().gated)(*operands), np.float32)
    np.testing.assert_array_equal(found[sum(sizes) :], 0)
    expected = np.asarray(gated(grouped_matmul, *operands), np.float32)
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.03)

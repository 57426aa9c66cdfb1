"""Hopper's experts and the choice of them on a Hopper GPU against the oracles: ``JAX_PLATFORMS=cuda pytest -m gpu``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import few
from pallas_kernels.grouped_matmul.few import Rule
from pallas_kernels.grouped_matmul.gated import gated
from pallas_kernels.grouped_matmul.reference import grouped_matmul
from pallas_kernels.grouped_matmul.route import route


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


RULES = [
    Rule(8, renormalize=True), Rule(8), Rule(4, sigmoid=True, renormalize=True, scale=2.5), Rule(9, sigmoid=True),
]  # fmt: skip


def choices(num_tokens, num_experts):
    """Logits, many of them equal, and which tokens are not padding."""
    logits = np.random.default_rng(num_tokens).standard_normal((num_tokens, num_experts)).round(1)
    return jnp.asarray(logits, jnp.float32), jnp.arange(num_tokens) % 5 != 1


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("num_experts", [64, 128])
@pytest.mark.parametrize("num_tokens", [96, 128, 256, 320, 4096, 16384])
def test_many_tokens_experts(num_tokens, num_experts, rule):
    from pallas_kernels.grouped_matmul.gpu_route import GpuRoute

    logits, live = choices(num_tokens, num_experts)
    expected = route(logits, live, rule)
    choose = jax.jit(lambda *each: GpuRoute()(*each, rule))
    for _ in range(3):
        found = choose(jnp.where(live[:, None], logits, jnp.nan), live)
        np.testing.assert_array_equal(found.experts, expected.experts)
        np.testing.assert_array_equal(found.so_far, expected.so_far)
        np.testing.assert_array_equal(found.counts, expected.counts)
        np.testing.assert_allclose(found.weights, expected.weights, atol=2e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("num_experts", [64, 128])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 16, 17, 33, 49, 63, 64])
def test_few_tokens_experts(num_tokens, num_experts, rule):
    from pallas_kernels.grouped_matmul import gpu_choose

    logits, live = choices(num_tokens, num_experts)
    x = jnp.ones((num_tokens, 2048), jnp.bfloat16)
    expected, expected_load = few.choose(logits, live, rule)
    count = int(expected.up_to[-1])
    choose = jax.jit(lambda *each: gpu_choose.choose(*each, rule))
    for _ in range(3):
        found, load, rows = choose(jnp.where(live[:, None], logits, jnp.nan), live, x)
        np.testing.assert_array_equal(found.up_to, expected.up_to)
        np.testing.assert_array_equal(found.used[:count], expected.used[:count])
        np.testing.assert_array_equal(load, expected_load)
        np.testing.assert_array_equal(rows[:num_tokens], x)
        np.testing.assert_allclose(found.weights[:, :num_tokens], expected.weights[:, :num_tokens], atol=2e-6)

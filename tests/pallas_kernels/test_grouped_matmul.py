"""Every way of computing a grouped matmul equals the oracle; padding rows are zero, whatever they held."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import blocked, dispatch, reference

pytestmark = pytest.mark.device
WAYS: dict[str, Callable[..., jax.Array]] = {
    "blocked": blocked.grouped_matmul,
    "ragged_dot": dispatch._ragged_dot,
}
CASES = {
    "one_row": (1, [0, 1, 0]),
    "nothing_live": (6, [0, 0, 0]),
    "all_in_one": (40, [0, 40, 0, 0]),
    "an_empty_first_and_last": (33, [0, 5, 9, 0, 17, 0]),
    "padding": (64, [3, 1, 0, 20]),
    "many_groups_few_rows": (5, [1, 0] * 8),
    "large_blocks": (700, [311, 1, 64, 65, 128]),
}


def operands(num_rows: int, sizes: list[int], dtype: object) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.RandomState(num_rows)
    lhs = random.standard_normal((num_rows, 24))
    lhs[sum(sizes) :] = 1e30  # padding may hold anything finite
    rhs = random.standard_normal((len(sizes), 10, 24))
    return jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype), jnp.asarray(sizes, jnp.int32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle(way: str, case: str) -> None:
    lhs, rhs, sizes = operands(*CASES[case], jnp.float32)
    found = jax.jit(WAYS[way])(lhs, rhs, sizes)
    assert found.dtype == jnp.float32
    live = sum(CASES[case][1])
    expected = [lhs[n] @ rhs[np.repeat(np.arange(len(sizes)), sizes)[n]].T for n in range(min(live, 4))]
    np.testing.assert_allclose(found[: len(expected)], np.reshape(expected, (-1, 10)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found, reference.grouped_matmul(lhs, rhs, sizes), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found[live:], 0)


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_accumulates_in_float32(way: str) -> None:
    lhs, rhs = jnp.ones((4, 4096), jnp.bfloat16), jnp.full((2, 3, 4096), 1.0, jnp.bfloat16)
    found = jax.jit(WAYS[way])(lhs, rhs, jnp.asarray([1, 2], jnp.int32))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[:3].astype(np.float32), 4096.0)


def test_a_cpu_takes_the_blocks() -> None:
    lhs, rhs, sizes = operands(*CASES["padding"], jnp.float32)
    compiled = jax.jit(dispatch.grouped_matmul).lower(lhs, rhs, sizes).compile()
    assert "while(" in compiled.as_text()
    assert "conditional(" not in compiled.as_text()
    np.testing.assert_array_equal(compiled(lhs, rhs, sizes), jax.jit(blocked.grouped_matmul)(lhs, rhs, sizes))


def test_few_rows_a_group_make_small_blocks() -> None:
    assert [blocked.block_rows(n, 8) for n in (1, 8, 33, 64, 400, 100_000)] == [4, 4, 4, 8, 64, 64]


class Kernel:
    """One that takes a single shape, and says that it was asked."""

    name = "kernel"

    def why_not(self, outputs: int, inner: int, dtype: object) -> str | None:
        return None if (outputs, inner, jnp.dtype(dtype)) == (10, 24, jnp.float32) else "too odd"

    def __call__(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return jnp.full((lhs.shape[0], rhs.shape[1]), 7, lhs.dtype)


def test_a_kernel_is_used_where_it_can_be() -> None:
    multiply = dispatch.WhereItCan(Kernel())
    lhs, rhs, sizes = operands(*CASES["padding"], jnp.float32)
    np.testing.assert_array_equal(multiply(lhs, rhs, sizes), 7)
    assert multiply.why_not(10, 23, jnp.float32) == "too odd"
    found = multiply(lhs[:, 1:], rhs[:, :, 1:], sizes)
    np.testing.assert_array_equal(found, dispatch.PORTABLE(lhs[:, 1:], rhs[:, :, 1:], sizes))
    mixed = multiply(lhs.astype(jnp.bfloat16), rhs, sizes)
    assert not (mixed == 7).all()


def test_the_choice_of_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.grouped_matmul.tpu import TpuGroupedMatmul

    class Device:
        def __init__(self, kind: str, capability: str | None = None) -> None:
            self.device_kind, self.compute_capability = kind, capability

    def on(device: Device, platform: str) -> tuple[dispatch.GroupedMatmul, str | None]:
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        return dispatch.grouped_matmul_of(platform)

    assert dispatch.grouped_matmul_of("cpu") == (dispatch.PORTABLE, None)
    assert on(Device("TPU v6 lite"), "tpu") == (dispatch.WhereItCan(TpuGroupedMatmul("v6e")), None)
    with pytest.raises(ValueError, match="TPU v2"):
        on(Device("TPU v2"), "tpu")
    chosen, why_not = on(Device("NVIDIA A100", "8.0"), "gpu")
    assert chosen == dispatch.PORTABLE
    assert "A100 has 8.0" in (why_not or "") or "needs jax" in (why_not or "")
    if jax.__version_info__ >= (0, 11):
        assert on(Device("NVIDIA H200", "9.0"), "gpu")[0].name == "mosaic_gpu"

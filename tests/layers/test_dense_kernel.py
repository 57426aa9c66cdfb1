"""Layers hand a kernel what it can do, with what follows the product, and XLA the rest: the results are the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.linear import contract, gated_linear, linear, split_linear
from jaxserve.layers.params import LayerContext
from pallas_kernels.dense_matmul import dispatch, reference
from pallas_kernels.dispatch import BlockedBackend

pytestmark = pytest.mark.device


@dataclass(frozen=True)
class Kernel:
    """The oracle, for up to 8 rows of bfloat16, or 9 with a residual; it says what it was asked for."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    invariant: bool = False
    name = "kernel"

    def why_not(
        self,
        num_rows: int,
        outputs: int,
        inner: int,
        dtype: Any,
        *,
        gated: bool = False,
        residual: bool = False,
    ) -> str | None:
        return None if num_rows <= 8 + residual and dtype == jnp.bfloat16 else "too many"

    def for_all_rows(self) -> Kernel:
        return replace(self, invariant=True)

    def __call__(self, x: jax.Array, weight: jax.Array, **kind: Any) -> jax.Array:
        self.asked.append({key: value for key, value in kind.items() if value is not None})
        dtype = kind.pop("out_dtype", None)
        return reference.dense_matmul(x, weight, **kind).astype(x.dtype if dtype is None else dtype)


def operands(rows: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (rows, 32), (48, 32), (rows, 48)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)  # type: ignore[return-value]


def test_a_kernel_computes_what_it_can() -> None:
    kernel = Kernel()
    context = LayerContext(np.dtype(jnp.bfloat16), BlockedBackend(), dense_matmul=kernel)
    without = LayerContext(np.dtype(jnp.bfloat16), BlockedBackend())
    x, weight, residual = operands(8)
    bias = weight[:, 0]
    pairs = [
        (contract(x, weight, kernel=kernel), contract(x, weight)),
        (linear(x, weight, kernel=kernel), linear(x, weight)),
        (linear(x, weight, bias, kernel=kernel), linear(x, weight, bias)),
        (split_linear(x, weight, None, context), split_linear(x, weight, None, without)),
        (
            split_linear(x, weight, None, context, residual),
            (residual.astype(jnp.float32) + contract(x, weight)).astype(jnp.bfloat16),  # rounded once
        ),
        (
            split_linear(x, weight, bias, context, residual),
            residual + split_linear(x, weight, bias, without),
        ),
    ]
    for found, expected in pairs:
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(
            *(np.asarray(each, np.float32) for each in (found, expected)), rtol=0.01, atol=1e-5
        )
    assert [sorted(each) for each in kernel.asked] == [
        ["out_dtype"], ["out_dtype"], ["out_dtype"], ["out_dtype"], ["residual"], ["out_dtype"]
    ]  # fmt: skip
    gated = gated_linear(x, weight, context)
    assert gated is not None
    gate, up = jnp.split(linear(x, weight).astype(jnp.float32), 2, axis=1)
    np.testing.assert_allclose(np.asarray(gated, np.float32), jax.nn.silu(gate) * up, rtol=0.01, atol=1e-5)


def test_the_rest_is_xlas() -> None:
    kernel = Kernel()
    context = LayerContext(np.dtype(jnp.bfloat16), BlockedBackend(), dense_matmul=kernel)
    x, weight, residual = operands(10)
    assert gated_linear(x, weight, context) is None
    found = split_linear(x, weight, None, context, residual)
    np.testing.assert_array_equal(found, residual + linear(x, weight))
    wide = operands(8, jnp.float32)
    np.testing.assert_array_equal(linear(*wide[:2], kernel=kernel), linear(*wide[:2]))
    np.testing.assert_array_equal(
        contract(x[:8].astype(jnp.float32), weight, kernel=kernel),
        contract(x[:8].astype(jnp.float32), weight),
    )
    assert kernel.asked == []


def test_xla_rounds_where_an_invariant_kernel_does() -> None:
    x, weight, residual = operands(10)
    bias = weight[:, 0]
    for kernel, barriers in ((Kernel(), (0, 0)), (Kernel().for_all_rows(), (0, 1))):
        context = LayerContext(np.dtype(jnp.bfloat16), BlockedBackend(), dense_matmul=kernel)
        for each, expected in zip((None, bias), barriers, strict=True):
            lowered = jax.jit(
                lambda *given, context=context: split_linear(*given[:3], context, given[3])
            ).lower(x, weight, each, residual)
            assert lowered.as_text().count("optimization_barrier") == expected  # a residual joins the product
        split_linear(x[:9], weight, None, context, residual[:9])
        linear(x[:9], weight, kernel=kernel)
        assert [sorted(asked) for asked in kernel.asked] == [["residual"]]


def test_an_invariant_kernel_rounds_no_product_that_a_residual_joins() -> None:
    """Else XLA adds to what is rounded here, and to what is not where the kernel has fewer rows."""

    @dataclass(frozen=True)
    class FewerWithResidual(Kernel):
        def why_not(self, num_rows: int, *args: Any, residual: bool = False, **kwargs: Any) -> str | None:
            return "too many" if residual and num_rows > 4 else super().why_not(num_rows, *args, **kwargs)

    @dataclass(frozen=True)
    class OfNoWeight(Kernel):
        def why_not(self, *args: Any, **kwargs: Any) -> str | None:
            return "not such a weight"

    x, weight, residual = operands(8)
    asked = {}
    for kernel in (FewerWithResidual(), FewerWithResidual().for_all_rows()):
        context = LayerContext(np.dtype(jnp.bfloat16), BlockedBackend(), dense_matmul=kernel)
        split_linear(x, weight, None, context, residual)
        asked[kernel.invariant] = [list(each) for each in kernel.asked]
        split_linear(x[:4], weight, None, context, residual[:4])
        split_linear(x, weight, None, context)
        assert [list(each) for each in kernel.asked][-2:] == [["residual"], ["out_dtype"]]
    assert asked == {False: [["out_dtype"]], True: []}
    context = LayerContext(np.dtype(jnp.bfloat16), BlockedBackend(), dense_matmul=OfNoWeight().for_all_rows())
    lowered = jax.jit(lambda *given: split_linear(*given[:2], None, context, given[2])).lower(
        x, weight, residual
    )
    assert (
        lowered.as_text().count("optimization_barrier") == 1
    )  # XLA's for all numbers of rows: rounded before


def test_the_choice_of_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, kind: str, capability: str) -> None:
            self.device_kind, self.compute_capability = kind, capability

    assert dispatch.dense_matmul_of("cpu") == (None, None)
    assert dispatch.dense_matmul_of("tpu") == (None, None)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("NVIDIA A100", "8.0")])
    kernel, why_not = dispatch.dense_matmul_of("gpu")
    assert kernel is None
    assert "A100 has 8.0" in (why_not or "") or "needs jax" in (why_not or "")
    if jax.__version_info__ >= (0, 11):
        monkeypatch.setattr(jax, "local_devices", lambda: [Device("NVIDIA H200", "9.0")])
        assert getattr(dispatch.dense_matmul_of("gpu")[0], "name", None) == "mosaic_gpu"

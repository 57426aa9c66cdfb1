"""Hopper's dense product on a Hopper GPU: the oracle, and the same bits for any number of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_matmul.reference import dense_matmul


def is_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]

SHAPES = {
    "handed over": (18432, 1024),
    "chunks": (1024, 2048),
    "chunks handed over": (2560, 4096),
    "a worker for each tile": (6144, 4096),
    "an odd block": (192, 320),
}
NUM_SMS = {"chunks handed over": 60}
KINDS: dict[str, list[dict[str, Any]]] = {
    "handed over": [{}, {"gated": True}],
    "chunks": [{"residual": True}],
    "chunks handed over": [{"residual": True}, {"out_dtype": jnp.float32}],
    "a worker for each tile": [{}, {"residual": True}],
    "an odd block": [{}, {"residual": True}],
}
ROWS = (1, 5, 8, 24, 100, 256, 700)


def multiply(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None, kind: dict[str, Any], config: Any,
    num_sms: int | None = None,
) -> Any:  # fmt: skip
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

    kind = {**kind, "residual": residual if "residual" in kind else None}
    return GpuDenseMatmul(num_sms, always=True, config=config)(x, weight, **kind)


@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_oracle_and_itself(name: str) -> None:
    outputs, inner = SHAPES[name]
    dtype = "float16" if name == "an odd block" else "bfloat16"
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((max(ROWS), inner)), dtype)
    weight = jnp.asarray(rng.standard_normal((outputs, inner)) * inner**-0.5, dtype)
    residual = jnp.asarray(rng.standard_normal((max(ROWS), outputs)), dtype)
    for kind in KINDS[name]:
        first = None
        for rows in ROWS:
            added = residual[:rows] if "residual" in kind else None
            run = jax.jit(lambda x, w, r, kind=kind: multiply(x, w, r, kind, None, NUM_SMS.get(name)))
            found = [np.asarray(run(x[:rows], weight, added)) for _ in range(3)]
            expected = dense_matmul(x[:rows], weight, residual=added, gated="gated" in kind)
            np.testing.assert_allclose(found[0].astype(np.float32), expected, rtol=0.02, atol=0.03)
            np.testing.assert_array_equal(found[1], found[0])
            np.testing.assert_array_equal(found[2], found[0])
            first = found[0] if first is None else first
            np.testing.assert_array_equal(found[0][:1], first)


@pytest.mark.parametrize("name", SHAPES)
def test_no_configuration_changes_a_bit(name: str) -> None:
    from pallas_kernels.dense_matmul.gpu_tuning import Config

    outputs, inner = SHAPES[name]
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((64, inner)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((outputs, inner)), jnp.bfloat16)
    settings = [
        Config(64), Config(8, step=128), Config(64, cluster=2), Config(128, cluster=4), Config(256),
        Config(16, stages=7, cluster=2), Config(64, consumers=1), Config(256, consumers=1, cluster=2),
    ]  # fmt: skip
    found = [
        np.asarray(
            jax.jit(lambda x, w, config=config: multiply(x, w, None, {"out_dtype": jnp.float32}, config))(
                x, weight
            )
        )
        for config in settings
    ]
    for each in found[1:]:
        np.testing.assert_array_equal(each, found[0])
    # Rows that hold NaN are no others' business.
    spoilt = jnp.where(jnp.arange(64)[:, None] == 3, jnp.nan, x)
    again = np.asarray(
        jax.jit(lambda x, w: multiply(x, w, None, {"out_dtype": jnp.float32}, Config(64)))(spoilt, weight)
    )
    np.testing.assert_array_equal(np.delete(again, 3, 0), np.delete(found[0], 3, 0))

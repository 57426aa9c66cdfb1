"""Hopper's grouped matmul against the oracle, interpreted on a CPU; its list of tiles, and that all of it lowers."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import COMPILER_OPTIONS, needs_mosaic_gpu, strict, unexpected_races

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.gated import gated
from pallas_kernels.grouped_matmul.gpu_work import Item, list_tiles, padded_rows

pytestmark = pytest.mark.device

CASES = {
    # rows, outputs, inner, blocks, sizes
    "an odd block of outputs": (
        48,
        192,
        256,
        2,
        [[3, 0, 22, 7], [0, 48, 0, 0], [0, 0, 0, 0], [8, 13, 3, 24]],
    ),
    "one row": (1, 64, 64, 1, [[0, 1]]),
}


def config(blocks: int = 1) -> Any:
    from pallas_kernels.grouped_matmul.gpu import Config

    extra = blocks - 1
    return Config(widths=(8, 16), blocks=blocks, step=64, stages=2, extra=extra, ahead=2 * extra)


@needs_mosaic_gpu
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

    num_rows, outputs, inner, blocks, every_sizes = CASES[name]
    rng = np.random.default_rng(0)
    multiply = GpuGroupedMatmul(num_sms=2, config=config(blocks), interpret=strict())
    compiled = None
    for sizes in every_sizes:
        lhs = rng.standard_normal((num_rows, inner))
        lhs[sum(sizes) :] = np.nan
        lhs = jnp.asarray(lhs, jnp.bfloat16)
        rhs = jnp.asarray(rng.standard_normal((len(sizes), outputs, inner)), jnp.bfloat16)
        rhs = jnp.where((jnp.asarray(sizes) == 0)[:, None, None], jnp.nan, rhs)  # nobody reads these
        operands = lhs, rhs, jnp.asarray(sizes, jnp.int32)
        compiled = compiled or jax.jit(multiply).lower(*operands).compile(COMPILER_OPTIONS)
        found = compiled(*operands)
        assert found.dtype == jnp.bfloat16
        expected = reference.grouped_matmul(*map(jnp.nan_to_num, operands))
        found = np.asarray(found, np.float32)
        np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.1, err_msg=str(sizes))
        np.testing.assert_array_equal(found[sum(sizes) :], 0)
    assert not unexpected_races(capsys.readouterr().out)


@needs_mosaic_gpu
@pytest.mark.parametrize("blocks", [1, 2])
def test_gate_and_up_in_one_kernel(blocks: int, capsys: pytest.CaptureFixture[str]) -> None:
    from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

    rng = np.random.default_rng(0)
    multiply = GpuGroupedMatmul(num_sms=2, config=config(blocks), interpret=strict())
    lhs = jnp.asarray(rng.standard_normal((24, 64)), jnp.bfloat16)
    gate_up = jnp.asarray(rng.standard_normal((3, 2, 192, 64)), jnp.bfloat16)
    operands = lhs, gate_up, jnp.asarray([5, 0, 17], jnp.int32)
    found = jax.jit(multiply.gated).lower(*operands).compile(COMPILER_OPTIONS)(*operands)
    expected = gated(reference.grouped_matmul, *operands)
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.02, atol=0.1)
    np.testing.assert_array_equal(found[22:].astype(jnp.float32), 0)
    assert not unexpected_races(capsys.readouterr().out)


def test_every_row_is_stored_once_by_its_group() -> None:
    rng = np.random.default_rng(1)
    widths, num_groups = (8, 24, 32), 7
    listed = jax.jit(list_tiles, static_argnums=(1, 2))
    for num_rows in (1, 13, 200):
        rows = padded_rows(num_rows, widths)
        assert rows % 8 == 0
        for _ in range(30):
            cuts = np.sort(rng.integers(0, num_rows + 1, num_groups))
            sizes = np.diff(np.concatenate([[0], cuts])) * (rng.random(num_groups) < 0.7)
            work = jax.tree.map(np.asarray, listed(jnp.asarray(sizes, jnp.int32), rows, widths))
            assert work.up_to[-1] <= len(work.items)
            owner = np.full(rows, -1)
            for item in work.items[: work.up_to[-1]]:
                first, begin, end, width = (
                    item[Item.FIRST],
                    item[Item.BEGIN],
                    item[Item.END],
                    widths[item[Item.WIDTH]],
                )
                assert first % 8 == 0
                assert 0 <= begin < end <= width
                assert first + width <= rows
                assert (owner[first + begin : first + end] == -1).all()
                owner[first + begin : first + end] = item[Item.GROUP]
            live = np.repeat(np.arange(num_groups), sizes)
            np.testing.assert_array_equal(owner, np.append(live, np.full(rows - len(live), num_groups)))


def lowered(num_rows: int, outputs: int, inner: int, num_groups: int, dtype: str = "bfloat16") -> str:
    from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

    operands = (
        jax.ShapeDtypeStruct((num_rows, inner), dtype),
        jax.ShapeDtypeStruct((num_groups, outputs, inner), dtype),
    )
    traced = jax.jit(GpuGroupedMatmul(num_sms=132)).trace(
        *operands, jax.ShapeDtypeStruct((num_groups,), jnp.int32)
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic_gpu
def test_it_lowers_once_for_every_number_of_few_rows() -> None:
    texts = [lowered(rows, 192, 128, 8) for rows in (1, 8, 128)]
    found = {name for text in texts for name in re.findall(r'kernel_hash = "([^"]*)"', text)}
    assert len(found) == 1
    assert all(text.count("custom_call @mosaic_gpu_v2") == 1 for text in texts)


@needs_mosaic_gpu
@pytest.mark.slow
@pytest.mark.parametrize("outputs,inner", [(1536, 2048), (2880, 2880)])
def test_it_lowers_for_many_rows(outputs: int, inner: int) -> None:
    assert "mosaic_gpu_v2" in lowered(32768, outputs, inner, 128, "float16")


@needs_mosaic_gpu
def test_configurations_that_cannot_run_are_refused() -> None:
    from pallas_kernels.grouped_matmul.gpu import CONSUMERS, Config, _tuning, supported, tuned

    for entry in _tuning()["tables"]:
        found = tuned((entry["rows_per_group"] or 1000) * 8, 8, gated=entry.get("gated", False))
        assert found.widths == tuple(entry["widths"])
    wrong = [
        dict(widths=(8, 12)), dict(widths=(16, 8)), dict(widths=()), dict(widths=(264,)), dict(widths=(8,), step=96),
        dict(widths=(256,), blocks=2), dict(widths=(64,), step=128, stages=8),
        dict(widths=(8,), consumer_registers=240), dict(widths=(8,), stages=1), dict(widths=(8,), extra=2),
        dict(widths=(8,), ahead=-1),
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(ValueError, match=r"width|step|register|memory|stages"):
            Config(**each)
    assert CONSUMERS == 2
    assert supported(1536, 2048, "float16") is None
    assert "float32" in (supported(1536, 2048, "float32") or "")
    assert "1536 x 96" in (supported(1536, 96, "bfloat16") or "")

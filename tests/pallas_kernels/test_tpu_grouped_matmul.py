"""The TPU's grouped matmul against the oracle, interpreted on a CPU, its list of items and its choice of tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import COMPILER_OPTIONS, races_found, strict

from pallas_kernels.grouped_matmul import reference, tpu
from pallas_kernels.grouped_matmul.tpu import Problem, Tiles, choose_tiles, supported
from pallas_kernels.grouped_matmul.tpu_work import row_tiles

pytestmark = pytest.mark.device

NUM_ROWS = 40
SIZES = {
    "nothing": [0, 0, 0, 0, 0],
    "one row": [0, 0, 1, 0, 0],
    "all in one": [0, 0, 0, NUM_ROWS, 0],
    "groups that share a tile, empty ones between": [3, 0, 7, 16, 1],
    "borders on tiles": [16, 0, 16, 0, 0],
    "full": [15, 1, 1, 22, 1],
    "the last tile is part padding": [0, 20, 0, 0, 15],
}


@pytest.mark.parametrize(
    "dtype,inner,tiles",
    [("float32", 256, Tiles(16, 256, 128, 1 << 24)), ("bfloat16", 192, Tiles(16, 128, 192, 1 << 24))],
)
def test_equals_the_oracle(dtype: str, inner: int, tiles: Tiles) -> None:
    rng = np.random.default_rng(0)
    multiply = jax.jit(
        lambda *args: tpu.grouped_matmul(*args, tiles=tiles, interpret=strict()),
        compiler_options=COMPILER_OPTIONS,
    )
    for name, sizes in SIZES.items():
        lhs = rng.standard_normal((NUM_ROWS, inner))
        lhs[sum(sizes) :] = np.nan
        lhs, rhs = jnp.asarray(lhs, dtype), jnp.asarray(rng.standard_normal((5, 256, inner)), dtype)
        rhs = jnp.where((jnp.asarray(sizes) == 0)[:, None, None], jnp.nan, rhs)  # nobody reads these
        found = multiply(lhs, rhs, jnp.asarray(sizes, jnp.int32))
        assert found.dtype == lhs.dtype, name
        assert not races_found(), name
        expected = reference.grouped_matmul(jnp.nan_to_num(lhs), jnp.nan_to_num(rhs), jnp.asarray(sizes))
        found, expected = (np.asarray(each, np.float32) for each in (found, expected))
        tolerance = 1e-4 if dtype == "float32" else 0.01
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=20 * tolerance, err_msg=name)
        np.testing.assert_array_equal(found[sum(sizes) :], 0, err_msg=name)


def test_every_row_has_one_item_of_its_group() -> None:
    rng = np.random.default_rng(1)
    listed = jax.jit(row_tiles, static_argnums=(1, 2))
    num_rows, tile_rows, num_groups = 96, 16, 9
    for _ in range(50):
        cuts = np.sort(rng.integers(0, num_rows + 1, num_groups))
        sizes = np.diff(np.concatenate([[0], cuts])) * (rng.random(num_groups) < 0.7)
        work = jax.tree.map(np.asarray, listed(jnp.asarray(sizes, jnp.int32), num_rows, tile_rows))
        owner = np.full(num_rows, -1)
        assert 1 <= work.count <= len(work.tile)
        assert (np.diff(work.tile) >= 0).all()
        assert set(work.tile[: work.count]) == set(range(num_rows // tile_rows))
        for item in range(work.count):
            rows = np.arange(num_rows)
            mine = (
                (rows // tile_rows == work.tile[item]) & (rows >= work.begin[item]) & (rows < work.end[item])
            )
            assert mine.any() or work.begin[item] == work.end[item]
            assert (owner[mine] == -1).all()
            owner[mine] = work.group[item]
        live = np.repeat(np.arange(num_groups), sizes)
        np.testing.assert_array_equal(owner, np.append(live, np.full(num_rows - len(live), -1)))


def test_tiles_fit_and_divide() -> None:
    for generation in tpu.tuning_table()["generations"]:
        for outputs, inner in [
            (1536, 2048),
            (2048, 768),
            (28672, 4096),
            (4096, 14336),
            (5760, 2880),
            (2048, 96),
        ]:
            tiles = choose_tiles(generation, Problem(512, outputs, inner, 2))
            assert tiles is not None
            assert outputs % tiles.outputs == inner % tiles.inner == 0
            assert tpu.vmem_bytes(tiles.rows, tiles.outputs, tiles.inner, 2) < tiles.vmem_limit
    qwen = choose_tiles("v6e", Problem(512, 1536, 2048, 2))
    assert qwen is not None
    assert (qwen.rows, qwen.outputs, qwen.inner) == (128, 1536, 2048)  # a group's weights arrive once
    few = choose_tiles("v6e", Problem(8, 1536, 2048, 2))
    assert few is not None
    assert few.rows == 16
    measured = {"generation": "v6e", "outputs": 1536, "inner": 2048, "itemsize": 2}
    measured |= {"tile_rows": 64, "tile_outputs": 768, "tile_inner": 1024}
    table = {**tpu.tuning_table(), "measured": [measured]}
    chosen = choose_tiles("v6e", Problem(512, 1536, 2048, 2), table)
    assert chosen is not None
    assert (chosen.rows, chosen.outputs, chosen.inner) == (64, 768, 1024)


def test_says_what_it_cannot_do() -> None:
    assert supported("v6e", 1536, 2048, "bfloat16") is None
    assert "float16" in (supported("v6e", 1536, 2048, "float16") or "")
    assert "20001 x 20001" in (supported("v5p", 20001, 20001, "bfloat16") or "")
    with pytest.raises(ValueError, match="TPU v99"):
        tpu.generation_of("TPU v99")

"""Hopper's dense product against the oracle, interpreted on a CPU; how its work is cut, and that all of it lowers."""

from __future__ import annotations

import functools
import re
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import COMPILER_OPTIONS, needs_mosaic_gpu, strict, unexpected_races

from pallas_kernels.dense_matmul import reference
from pallas_kernels.dense_matmul.gpu_work import Line, chunk_borders

pytestmark = pytest.mark.device

CASES: dict[str, tuple[tuple[int, int, int], dict[str, int], dict[str, Any]]] = {
    # rows, outputs, inner; configuration; arguments
    "sums handed over, an odd block of outputs": ((8, 320, 192), dict(width=8), dict(num_sms=2, chunks=1)),
    "64 outputs a tile, a worker each": (
        (8, 192, 192),
        dict(width=8, consumers=1),
        dict(num_sms=3, chunks=1),
    ),
    "chunks handed over and added up, a residual": (
        (13, 192, 512),
        dict(width=16),
        dict(num_sms=3, chunks=2, residual=True),
    ),
    "chunks added up on the way": (
        (24, 192, 384),
        dict(width=8),
        dict(num_sms=5, chunks=3, residual=True),
    ),
    "gated, two tiles of tokens": ((9, 256, 128), dict(width=8), dict(num_sms=2, chunks=1, gated=True)),
    "shared rows, float32": (
        (16, 192, 128),
        dict(width=16, cluster=2),
        dict(num_sms=4, chunks=1, out_dtype="float32"),
    ),
}


@needs_mosaic_gpu
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pallas_kernels.dense_matmul.gpu_product import dense_matmul
    from pallas_kernels.dense_matmul.gpu_tuning import Config

    (num_rows, outputs, inner), config, arguments = CASES[name]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((num_rows, inner)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((outputs, inner)), jnp.bfloat16)
    residual = jnp.asarray(rng.standard_normal((num_rows, outputs)) * 20, jnp.bfloat16)
    rest = {key: value for key, value in arguments.items() if key != "residual"}

    def multiply(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array:
        added = residual if "residual" in arguments else None
        settings = Config(**config, stages=2)
        return dense_matmul(x, weight, residual=added, config=settings, interpret=strict(), **rest)

    found = jax.jit(multiply).lower(x, weight, residual).compile(COMPILER_OPTIONS)(x, weight, residual)
    assert found.dtype == arguments.get("out_dtype", "bfloat16")
    expected = reference.dense_matmul(
        x, weight, residual=residual if "residual" in arguments else None, gated="gated" in arguments
    )
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=0.01, atol=0.15)
    if "residual" in arguments:  # rounded once: of those rounded before, too, every fifth would be another
        assert np.mean(np.asarray(found != expected.astype(found.dtype))) < 0.01
    assert not unexpected_races(capsys.readouterr().out)


def test_stretches_are_even_and_chunks_are_the_shapes() -> None:
    """Every step has one worker, and only a neighbour's sums are waited for: those of what it did first."""
    for tiles, inner, chunks, step in (
        (48, 4096, 3, 128),
        (224, 4096, 1, 64),
        (32, 4096, 4, 64),
        (7, 448, 2, 64),
    ):
        borders = tuple(each // step for each in chunk_borders(inner, chunks))
        assert borders[0] == 0
        assert borders[-1] * step == inner
        longest = max(b - a for a, b in pairwise(borders))
        for workers in (1, 3, 66, 132):
            if workers > tiles * chunks:
                continue
            line = Line(tiles, borders, workers, 0)
            cuts = [line.border(worker) for worker in range(workers + 1)]
            assert (cuts[0], cuts[-1]) == (0, tiles * line.steps)
            sizes = np.diff(cuts)
            assert sizes.max() - sizes.min() <= 1
            assert sizes.min() >= longest - 1  # else a chunk would wait for a chain of workers
            traced = [int(line.border(jnp.int32(worker))) for worker in range(workers + 1)]
            assert traced == cuts
            assert line.shares_chunks == any(cut % line.steps not in borders for cut in cuts)
    folding = Line.shared_by(5, jnp.int32(6), (0, 5, 10, 16), hand_over=False, folds=True)
    cuts = [int(folding.border(jnp.int32(worker))) for worker in range(8)]
    assert cuts == [0, 21, 37, 58, 74, 96, 96, 96]
    tile, start, stop = jnp.int32(1), jnp.int32(21), jnp.int32(32)
    assert [int(each) for each in folding.chunks_between(tile, start, stop)] == [1, 3]
    assert [int(folding.chunk_border(tile, chunk)) for chunk in range(4)] == [16, 21, 26, 32]
    line = Line(4, (0, 5, 10, 16), 3, 2)
    for last in range(4 * 16):
        tile, chunk, first, end = (int(each) for each in line.chunk_of(jnp.int32(last)))
        assert tile == last // 16
        assert (first, end) == (tile * 16 + line.borders[chunk], tile * 16 + line.borders[chunk + 1])
        assert first <= last < end
    # A border near a chunk's moves there, but not on from there.
    assert [Line(2, (0, 2, 4, 8), 3, 3).border(worker) for worker in range(4)] == [0, 4, 10, 16]


@needs_mosaic_gpu
def test_the_order_of_sums_follows_the_shape_alone() -> None:
    from pallas_kernels.dense_matmul.gpu_tuning import chunks_of

    assert {(n, k): chunks_of(n, k) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))} == {
        (6144, 4096): 1, (4096, 4096): 1, (28672, 4096): 1, (4096, 14336): 2
    }  # fmt: skip
    assert [chunks_of(64, 64), chunks_of(1024, 2048), chunks_of(2048, 512)] == [1, 3, 2]
    assert chunk_borders(4096, 3) == (0, 1280, 2688, 4096)
    assert chunk_borders(320, 2) == (0, 128, 320)


def lowered(num_rows: int, outputs: int, inner: int, config: Any = None, **kind: Any) -> str:
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

    x, weight = (jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16) for rows in (num_rows, outputs))
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    residual = struct((num_rows, outputs)) if kind.pop("residual", False) else None
    multiply = GpuDenseMatmul(num_sms=132, always=True, config=config)
    run = jax.jit(functools.partial(multiply, **kind))
    traced = run.trace(x, weight, residual=residual)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic_gpu
def test_it_lowers() -> None:
    from pallas_kernels.dense_matmul.gpu_tuning import Config

    texts = [
        lowered(1, 6144, 4096),
        lowered(64, 28672, 4096, gated=True),
        lowered(256, 4096, 14336, residual=True),
        lowered(8, 128256, 4096, out_dtype=jnp.float32),
        lowered(64, 4096, 4096, Config(64, cluster=2)),
        lowered(8, 4096, 1024),
        lowered(500, 28672, 4096, gated=True),
        lowered(500, 4096, 14336, residual=True),
        lowered(500, 6144, 4096, out_dtype=jnp.float32),
    ]
    assert all(text.count("custom_call @mosaic_gpu_v2") == 1 for text in texts)
    many = [lowered(rows, 4096, 1024, residual=True) for rows in (512, 1024)]
    assert len({re.findall(r'kernel_hash = "([^"]*)"', text)[0] for text in many}) == 1


@needs_mosaic_gpu
def test_what_cannot_run_is_refused() -> None:
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul
    from pallas_kernels.dense_matmul.gpu_case import supported
    from pallas_kernels.dense_matmul.gpu_tuning import Config, _tuning, tuned

    for entry in _tuning()["tables"]:
        case = {key: entry.get(key, False) for key in ("chunked", "gated")}
        size = entry.get("outputs", 64), entry.get("inner", 64)
        assert tuned(entry["rows"] or 100_000, *size, **case).width == entry["width"]
    wrong = [
        dict(width=12), dict(width=264), dict(width=72), dict(width=8, cluster=2), dict(width=64, cluster=3),
        dict(width=8, step=96), dict(width=8, stages=1), dict(width=256, stages=5),
        dict(width=8, consumer_registers=240), dict(width=8, consumers=3),
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(ValueError, match=r"width|step|register|memory|stages|cluster|consumers"):
            Config(**each)
    assert supported(6144, 4096, "float16") is None
    assert "float32" in (supported(6144, 4096, "float32") or "")
    assert "6144 x 96" in (supported(6144, 96, "bfloat16") or "")
    assert "128" in (supported(6208, 64, "bfloat16", gated=True) or "")
    x, weight = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.float16)
    with pytest.raises(ValueError, match="one type"):
        GpuDenseMatmul(always=True)(x, weight)
    square = weight.astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="float32 without"):
        GpuDenseMatmul(num_sms=2, always=True)(x, square, residual=x, out_dtype=jnp.float32)
    with pytest.raises(ValueError, match="leaves 1 rows by 64 x 64 to XLA"):
        GpuDenseMatmul(num_sms=2)(x[:1], square)


@needs_mosaic_gpu
def test_the_table_says_who_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.dense_matmul import gpu, gpu_tuning

    monkeypatch.setattr(gpu_tuning, "_tuning", lambda: table)
    table: dict[str, Any] = {
        "used": [
            {"outputs_from": 4096, "rows": [1, 0]},
            {"gated": True, "mib_from": 1, "rows": [1, 32]},
            {"outputs": 128, "inner": 256, "rows": [9, 16]},
            {"rows": [2, 8]},
        ],
        "invariant_xla": [1, 2, 8, 16, 32, 64, 65],
        "invariant": [
            {"gated": True, "rows": 0},
            {"residual": True, "mib_from": 1, "rows": 8},
            {"residual": True, "outputs": 4096, "rows": 32},
            {"residual": True, "rows": None},
            {"rows": 64},
        ],
        "chunks": [],
        "tables": [{"rows": None, "width": 8}],
    }

    def used(kernel: Any, *size: int, **kind: bool) -> list[int]:
        rows = (1, 2, 8, 9, 16, 32, 64, 65)
        return [n for n in rows if kernel.why_not(n, *size, "bfloat16", **kind) is None]

    kernel = gpu.GpuDenseMatmul(num_sms=2)
    assert used(kernel, 4096, 64) == []
    assert used(kernel, 1024, 512, gated=True) == [1, 2, 8, 9, 16, 32]
    assert used(kernel, 1024, 448, gated=True) == [2, 8]
    assert used(kernel, 128, 256) == [9, 16]
    assert used(kernel, 64, 64) == [2, 8]
    assert used(kernel, 64, 96) == []
    invariant = kernel.for_all_rows()  # which multiplies 9 rows in any case
    assert used(invariant, 4096, 64) == [1, 2, 8, 9, 16, 32, 64]
    assert used(invariant, 4096, 64, residual=True) == [1, 2, 8, 9, 16, 32]
    assert used(invariant, 1024, 512, residual=True) == [1, 2, 8, 9]
    assert used(invariant, 1024, 64, residual=True) == [1, 2, 8, 9, 16, 32, 64, 65]
    assert used(invariant, 1024, 512, gated=True) == [9]
    table["invariant"] = []
    assert used(invariant, 4096, 64) == [9]

"""Grouped matmul for TPU (Mosaic): a walk over the pairs of a group and a tile of its rows.

Central ideas:

* The grid is (tiles of outputs, items, tiles of the contracted dimension); items come from ``tpu_work``, and there are
  as many steps as live ones. Weights are only fetched when the group changes (or the tile of a contracted dimension
  that does not fit in whole), so that with few rows a group each matrix in use is read once and no other one.
* Rows that a tile shares with other groups, and padding, are masked: the result's tile stays in VMEM while the items
  of that tile follow one another, each adding its rows to those that the others left. The first one zeroes the rest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.gated import gated
from pallas_kernels.grouped_matmul.tpu_work import row_tiles
from pallas_kernels.tpu_generations import generation_of, generations

LANES = 128
SMALLEST_ROWS = 16
"""Rows of a tile of a packed type."""
DTYPES = ("bfloat16", "float32")


@functools.cache
def tuning_table() -> Mapping[str, Any]:
    """The package's table: generations, the heuristic's constants, measurements."""
    table = json.loads(resources.files(__package__).joinpath("tpu_tuning.json").read_text())
    return {"generations": generations(), **table}


@dataclass(frozen=True)
class Problem:
    """What tile sizes depend on: N, M, K of one device's product, and bytes of an element."""

    num_rows: int
    outputs: int
    inner: int
    itemsize: int


@dataclass(frozen=True)
class Tiles:
    """Rows, outputs and contracted elements of one step of the grid, and bytes of VMEM the compiler may use."""

    rows: int
    outputs: int
    inner: int
    vmem_limit: int


def vmem_bytes(rows: int, outputs: int, inner: int, itemsize: int) -> int:
    """Bytes of VMEM of one step: operands and results twice, as they come and go, sums and a temporary in float32."""
    moving = rows * inner + outputs * inner + rows * outputs
    return 2 * moving * itemsize + 2 * rows * outputs * 4


def choose_tiles(generation: str, problem: Problem, table: Mapping[str, Any] | None = None) -> Tiles | None:
    """Tile sizes for a problem; None where nothing fits into VMEM.

    Args:
        generation: a name in the table.
        problem: one device's share.
        table: instead of the package's.
    """
    table = tuning_table() if table is None else table
    chip, rule = table["generations"][generation], table["heuristic"]
    vmem = chip["vmem_mib"] << 20
    budget, limit = int(vmem * rule["vmem_share"]), int(vmem * 0.9)
    rows = min(rule["rows"], -(-problem.num_rows // SMALLEST_ROWS) * SMALLEST_ROWS)
    for entry in table["measured"]:
        if entry["generation"] == generation and all(
            entry[name] == getattr(problem, name) for name in ("outputs", "inner", "itemsize")
        ):
            return Tiles(min(entry["tile_rows"], rows), entry["tile_outputs"], entry["tile_inner"], limit)
    # The whole contracted dimension if at all possible: then the items of a group share one fetch of its weights.
    for inner in _divisors(problem.inner, problem.inner):
        for outputs in _divisors(problem.outputs, rule["outputs"]):
            if vmem_bytes(rows, outputs, inner, problem.itemsize) <= budget:
                return Tiles(rows, outputs, inner, limit)
    return None


def _divisors(size: int, most: int) -> list[int]:
    """Tiles that divide a dimension, largest first: multiples of 128, or all of it."""
    tiles = [tile for tile in range(LANES, min(size, most) + 1, LANES) if size % tile == 0]
    whole = [size] if size % LANES or size <= most else []
    return sorted({*tiles, *whole}, reverse=True)


def supported(generation: str, outputs: int, inner: int, dtype: Any) -> str | None:
    """Why the kernel cannot multiply by [outputs, inner] matrices, None when it can."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"the TPU grouped matmul takes {' or '.join(DTYPES)}, not {name}"
    problem = Problem(tuning_table()["heuristic"]["rows"], outputs, inner, jnp.dtype(dtype).itemsize)
    if choose_tiles(generation, problem) is None:
        return (
            f"the TPU grouped matmul finds no tiles of {outputs} x {inner} matrices of {name} that fit into the VMEM "
            f"of {generation}: sizes that are multiples of {LANES} have more of them"
        )
    return None


def grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tiles: Tiles, interpret: Any = False
) -> jax.Array:
    """[N, M] in lhs's type, accumulated in float32; padding rows are zero.

    Args:
        lhs: [N, K], sorted by group, padding last.
        rhs: [E, M, K] of the same type.
        group_sizes: int32 [E].
        tiles: which divide M and K.
        interpret: ``pltpu.InterpretParams`` runs it on a CPU.
    """
    num_rows, (_, outputs, inner) = lhs.shape[0], rhs.shape
    padded = jnp.pad(lhs, ((0, -num_rows % tiles.rows), (0, 0)))
    work = row_tiles(group_sizes, padded.shape[0], tiles.rows)
    steps = inner // tiles.inner
    # XLA lays matrices out so that lanes are full; a kernel that wants them otherwise has them copied.
    inner_first = inner % LANES != 0 and outputs % LANES == 0
    scalars = (work.group, work.tile, work.begin, work.end)

    def rows_block(_: Any, item: Any, step: Any, group: Any, tile: Any, *rest: Any) -> tuple[Any, Any]:
        return tile[item], step

    def weights_block(out: Any, item: Any, step: Any, group: Any, *rest: Any) -> tuple[Any, Any, Any]:
        return (group[item], step, out) if inner_first else (group[item], out, step)

    def result_block(out: Any, item: Any, _: Any, group: Any, tile: Any, *rest: Any) -> tuple[Any, Any]:
        return tile[item], out

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(outputs // tiles.outputs, work.count, steps),
        in_specs=[
            pl.BlockSpec((tiles.rows, tiles.inner), rows_block),
            pl.BlockSpec(
                (None, *((tiles.inner, tiles.outputs) if inner_first else (tiles.outputs, tiles.inner))),
                weights_block,
            ),
        ],
        out_specs=pl.BlockSpec((tiles.rows, tiles.outputs), result_block),
        scratch_shapes=[pltpu.VMEM((tiles.rows, tiles.outputs), jnp.float32)],
    )
    call = pl.pallas_call(
        functools.partial(_kernel, steps=steps, inner_first=inner_first),
        grid_spec=spec,
        out_shape=jax.ShapeDtypeStruct((padded.shape[0], outputs), lhs.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=tiles.vmem_limit
        ),
        name="grouped_matmul",
        interpret=interpret,
    )
    return call(*scalars, padded, jnp.swapaxes(rhs, 1, 2) if inner_first else rhs)[:num_rows]


def _kernel(
    group: Any, tile: Any, begin: Any, end: Any, lhs: Any, rhs: Any, out: Any, sums: Any, *, steps: int,
    inner_first: bool,
) -> None:  # fmt: skip
    item, step = pl.program_id(1), pl.program_id(2)
    is_first = (item == 0) | (tile[item] != tile[jnp.maximum(item - 1, 0)])

    @pl.when(is_first & (step == 0))
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(begin[item] < end[item])
    def _() -> None:
        precision = jax.lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
        product = jax.lax.dot_general(
            lhs[...], rhs[...], (((1,), (0 if inner_first else 1,)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip

        def finish(total: jax.Array) -> None:
            row = tile[item] * out.shape[0] + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
            ours = (row >= begin[item]) & (row < end[item])
            kept = out[...].astype(jnp.float32)
            out[...] = jnp.where(ours, total, kept).astype(out.dtype)

        if steps == 1:
            finish(product)
            return

        @pl.when(step == 0)
        def _() -> None:
            sums[...] = product

        @pl.when(step > 0)
        def _() -> None:
            sums[...] += product

        pl.when(step == steps - 1)(lambda: finish(sums[...]))


@dataclass(frozen=True)
class TpuGroupedMatmul:
    """The kernel on one generation of TPU; see ``dispatch.GroupedMatmul``. Static in the compiled step.

    Args:
        generation: ``v5e``, ``v5p``, ``v6e``, ``tpu7x``.
        tiles: instead of the tuning table's choice.
        interpret: ``pltpu.InterpretParams`` runs it on a CPU.
    """

    generation: str
    tiles: Tiles | None = None
    interpret: Any = False
    name = "mosaic_tpu"
    few = None
    route = None

    def why_not(self, outputs: int, inner: int, dtype: Any) -> str | None:
        """Why it cannot multiply by [outputs, inner] matrices, None when it can."""
        return supported(self.generation, outputs, inner, dtype)

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """[N, M].

        Raises:
            ValueError: what ``why_not`` says, or operands of two types.
        """
        (num_rows, inner), outputs = lhs.shape, rhs.shape[1]
        if lhs.dtype != rhs.dtype:
            raise ValueError(
                f"the TPU grouped matmul takes rows and matrices of one type, not {lhs.dtype} and {rhs.dtype}"
            )
        if (reason := self.why_not(outputs, inner, lhs.dtype)) is not None:
            raise ValueError(reason)
        problem = Problem(num_rows, outputs, inner, lhs.dtype.itemsize)
        tiles = self.tiles or choose_tiles(self.generation, problem)
        assert tiles is not None
        return grouped_matmul(lhs, rhs, group_sizes, tiles=tiles, interpret=self.interpret)

    def gated(self, lhs: jax.Array, gate_up: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """[N, F], silu(gate) * up of rows [N, M] and matrices [E, 2, F, M]; raises as ``__call__`` does."""
        return gated(self, lhs, gate_up, group_sizes)


__all__ = [
    "Problem",
    "TpuGroupedMatmul",
    "Tiles",
    "choose_tiles",
    "generation_of",
    "grouped_matmul",
    "supported",
]

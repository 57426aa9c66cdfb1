"""What is tuned of the Hopper dense product, and what ``gpu_tuning.json`` says of it for a shape.

``gpu_product`` says the ideas behind it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jax.experimental import pallas as pl

ROWS = 64
"""Outputs of one instruction, and the elements of a swizzled line."""
COLUMNS = 64
"""Tokens stored at a time."""
ALIGNED = 8
WIDEST = 256
SHARED_MEMORY = 232_448
"""Bytes of one CTA."""
FILLED, MOST_CHUNKS, SHORTEST_CHUNK = 48, 4, 256
"""Chunks are made until there are so many of 64 outputs, up to so many and no shorter than that.

64 multiprocessors load 3.9 TB/s, and handing sums over costs 2 us."""


@dataclass(frozen=True)
class Config:
    """What is tuned. None of it changes a bit of the result.

    Args:
        width: tokens of a tile, a multiple of 8 up to 256.
        step: contracted elements loaded at a time, 64 or 128; 64 where 128 does not divide them.
        stages: steps in flight, 2 or more.
        cluster: CTAs that share the rows they load, 1, 2 or 4.
        consumers: multiplying warpgroups of a CTA, with 64 outputs each, 1 or 2.
        hand_over: sums go from one worker to another, so that all have as much to do.
        consumer_registers, producer_registers: registers a thread of a multiplying and of the loading warpgroup gets.
    """

    width: int
    step: int = 64
    stages: int = 4
    cluster: int = 1
    consumers: int = 2
    hand_over: bool = True
    consumer_registers: int = 216
    producer_registers: int = 72

    def __post_init__(self) -> None:
        if self.consumers not in (1, 2):
            raise ValueError(f"consumers are 1 or 2, not {self.consumers}")
        if self.cluster not in (1, 2, 4):
            raise ValueError(f"cluster is 1, 2 or 4, not {self.cluster}")
        if self.width % (ALIGNED * self.cluster) or not 0 < self.width <= WIDEST:
            raise ValueError(
                f"width is a multiple of {ALIGNED} x cluster ({self.cluster}) up to {WIDEST}, not {self.width}"
            )
        if self.width > COLUMNS and self.width % COLUMNS:
            raise ValueError(f"a width above {COLUMNS} is a multiple of it, unlike {self.width}")
        if self.step not in (64, 128):
            raise ValueError(f"step is 64 or 128, not {self.step}")
        if self.stages < 2:
            raise ValueError(
                "stages are 2 or more: a step's memory is free once the next one's product has begun"
            )
        # A CTA starts with 168 registers a thread, and a warpgroup that asks for more than are free waits for ever.
        if 2 * self.consumer_registers + self.producer_registers > 168 * 3:
            raise ValueError(f"{self} gives out more registers than a CTA has")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(f"{self} needs {self.shared_memory} bytes of shared memory, of {SHARED_MEMORY}")

    @property
    def columns(self) -> int:
        """Tokens that leave at a time."""
        return min(self.width, COLUMNS)

    @property
    def shared_memory(self) -> int:
        """Bytes, about 1 KiB of barriers and alignment included, for results of 16 bits."""
        loads = self.stages * (self.consumers * ROWS + self.width) * self.step * 2
        return loads + self.consumers * self.columns * ROWS * 2 + 1024


@functools.cache
def _tuning() -> dict[str, Any]:
    file = resources.files("pallas_kernels.dense_matmul") / "gpu_tuning.json"
    return json.loads(file.read_text())


def tuned(num_rows: int, outputs: int, inner: int, *, chunked: bool = False, gated: bool = False) -> Config:
    """The table's configuration for so many rows.

    Args:
        outputs, inner: sizes of the weight.
        chunked: its contracted dimension is in chunks.
        gated: it is a gate's and as many others.
    """
    case = dict(outputs=outputs, inner=inner, chunked=chunked, gated=gated)
    for entry in _tuning()["tables"]:
        enough = entry["rows"] is None or num_rows <= entry["rows"]
        if enough and all(entry.get(key, value) == value for key, value in case.items()):
            rest = ("rows", "source", *case)
            return Config(**{key: value for key, value in entry.items() if key not in rest})
    raise ValueError("gpu_tuning.json has no entry for any number of rows: its last one's rows is null")


def chunks_of(outputs: int, inner: int) -> int:
    """Chunks of the contracted dimension. They decide a result's bits, so nothing but the shape decides them."""
    for entry in _tuning()["chunks"]:
        if (entry["outputs"], entry["inner"]) == (outputs, inner):
            return entry["chunks"]
    most = max(min(MOST_CHUNKS, inner // SHORTEST_CHUNK), 1)
    return min(pl.cdiv(FILLED, pl.cdiv(outputs, ROWS)), most)


def rows_from_table(outputs: int, inner: int, item_size: int, *, gated: bool = False) -> tuple[int, int]:
    """From how many to how many rows the table has this kernel multiply by an [outputs, inner] weight."""
    entry = _first_of("used", outputs, inner, item_size, gated=gated)
    first, last = (1, 0) if entry is None else entry["rows"]
    return first, last


def invariant_multiplies(
    num_rows: int, outputs: int, inner: int, item_size: int, *, gated: bool = False, residual: bool = False
) -> bool:
    """Whether ``for_all_rows`` multiplies so many rows by an [outputs, inner] weight; else XLA has the same bits."""
    if num_rows not in _tuning()["invariant_xla"]:
        return True
    entry = _first_of("invariant", outputs, inner, item_size, gated=gated, residual=residual)
    return entry is not None and (entry["rows"] is None or num_rows <= entry["rows"])


def _first_of(name: str, outputs: int, inner: int, item_size: int, **kind: bool) -> dict[str, Any] | None:
    """The first entry of a list that is for this product, None if none is."""
    case = dict(outputs=outputs, inner=inner, **kind)
    mib = outputs * inner * item_size / 2**20
    for entry in _tuning()[name]:
        large = mib >= entry.get("mib_from", 0) and outputs >= entry.get("outputs_from", 0)
        if large and all(entry.get(key, value) == value for key, value in case.items()):
            return entry
    return None

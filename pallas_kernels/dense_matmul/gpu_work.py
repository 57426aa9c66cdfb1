"""How the Hopper kernel's work is cut: into chunks that fix the order of sums, and into stretches that fill the chip.

The work is one line of steps: tiles in order, in a tile its contracted dimension in order. Two kinds of cuts:

* *Chunks* cut a tile's contracted dimension at places that depend on the weight's shape alone. Chunks are summed
  each on its own and then added up in order, so they decide the bits of a result.
* *Stretches* share the line out among workers evenly, whatever they cut. Of a chunk that two of them share, the
  second goes on from the sums that the first left, as if one had done it all: they decide nothing but the time. A
  worker walks its stretch backwards, so that what another one waits for is the first thing it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
from jax import lax

UNIT = 128
"""Contracted elements that no chunk's border divides; 64 where it does not divide all of them."""
EVENNESS = 40
"""A stretch's border moves to a chunk's if it is no farther than a stretch over this."""


def chunk_borders(inner: int, chunks: int) -> tuple[int, ...]:
    """Where chunks begin, and the last one ends, in contracted elements."""
    unit = UNIT if inner % UNIT == 0 else 64
    return tuple(unit * (inner // unit * i // chunks) for i in range(chunks + 1))


@dataclass(frozen=True)
class Line:
    """A product's steps, in the order in which they are shared out.

    Args:
        tiles: of outputs and tokens, an integer or a traced one.
        borders: of a tile's chunks, in steps; the last is the steps of a tile.
        workers: that share it; the stretches of any others are empty.
        snap: a stretch's border so many steps from a chunk's moves there.
        folds: a worker does all of a tile's chunks in its stretch in one go, adding up as it goes on.
    """

    tiles: Any
    borders: tuple[int, ...]
    workers: Any
    snap: Any
    folds: bool = False

    @classmethod
    def shared_by(
        cls, most_workers: int, tiles: Any, borders: tuple[int, ...], *, hand_over: bool, folds: bool = False
    ) -> Line:
        """The line of so many tiles, for up to so many workers.

        Args:
            hand_over: stretches may end within a chunk; else they end with one, and are less even.
        """
        chunks = len(borders) - 1
        workers = _where(tiles * chunks < most_workers, tiles * chunks, most_workers)
        # With a worker for each chunk it has that.
        whole = (workers == tiles * chunks) | (not hand_over)
        snap = _where(whole, borders[-1], _div(tiles * borders[-1], workers * EVENNESS))
        return cls(tiles, borders, workers, snap, folds)

    @property
    def steps(self) -> int:
        """Of a tile."""
        return self.borders[-1]

    @property
    def chunks(self) -> int:
        return len(self.borders) - 1

    def border(self, worker: Any) -> Any:
        """Where a worker's stretch begins; of the number of workers, and of any other, where the last one ends."""
        worker = _where(worker < self.workers, worker, self.workers)
        even = _div(worker * (self.tiles * self.steps), self.workers)
        tile = _div(even, self.steps) * self.steps
        at, nearest = even, self.snap + 1
        for each in self.borders:
            distance = even - (tile + each)
            distance = _where(distance < 0, -distance, distance)
            near = distance < nearest
            at, nearest = _where(near, tile + each, at), _where(near, distance, nearest)
        return at

    def chunk_of(self, last: Any) -> tuple[Any, Any, Any, Any]:
        """A step's tile, chunk in it, and the chunk's first step and end on the line; all chunks are one that folds."""
        tile = _div(last, self.steps)
        if self.folds:
            return tile, tile * 0, tile * self.steps, (tile + 1) * self.steps
        inside = last - tile * self.steps
        chunk, first, end = inside * 0, inside * 0, inside * 0 + self.borders[1]
        for i in range(1, self.chunks):
            after = inside >= self.borders[i]
            chunk, first = _where(after, i, chunk), _where(after, self.borders[i], first)
            end = _where(after, self.borders[i + 1], end)
        return tile, chunk, tile * self.steps + first, tile * self.steps + end

    def chunks_between(self, tile: Any, start: Any, stop: Any) -> tuple[Any, Any]:
        """The first of a tile's chunks in a stretch that begins and ends with chunks, and one past the last."""
        first, end = tile * 0, tile * 0 + 1
        for border in self.borders[1:-1]:
            first += _where(start - tile * self.steps >= border, 1, 0)
            end += _where(stop - tile * self.steps > border, 1, 0)
        return first, end

    def chunk_border(self, tile: Any, chunk: Any) -> Any:
        """Where a tile's chunk begins on the line; of the number of chunks, where the last one ends."""
        at = tile * self.steps
        for i, (before, border) in enumerate(pairwise(self.borders)):
            at += _where(chunk > i, border - before, 0)
        return at

    @property
    def shares_chunks(self) -> bool:
        """Whether a stretch's border divides a chunk."""
        inside = {border % self.steps for border in map(self.border, range(self.workers + 1))}
        return not inside <= set(self.borders)


def _div(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return lax.div(jnp.int32(a), jnp.int32(b))


def _where(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, bool):
        return a if condition else b
    return jnp.where(condition, a, b)

"""WeightSource: one checkpoint tensor and its place in a parameter. A list of them is all a loader needs.

A loader fills one shard of a parameter at a time: ``pieces`` says which parts of the tensor go there, so nothing else
of it has to be read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType

import numpy as np

from jaxserve.weights.checkpoint import Checkpoint

Index = tuple[int | slice | EllipsisType, ...]
Range = tuple[int, int]
"""Begin and end, as in a slice."""
Box = tuple[Range, ...]
"""A range a dimension: a shard of a parameter."""


@dataclass(frozen=True)
class Piece:
    """``shard[into].reshape(view)[index] = source.arranged(tensor)[part]``: views, since dimensions are only split."""

    into: tuple[slice, ...]
    view: tuple[int, ...]
    index: tuple[int | slice, ...]
    part: tuple[slice, ...]

    def target(self, shard: np.ndarray) -> np.ndarray:
        """The part of ``shard`` that the piece fills, as a view of it."""
        return shard[self.into].reshape(self.view)[
            (*self.index, ...)
        ]  # with the dots a view, even of one element


@dataclass(frozen=True)
class TensorPart:
    """A part of a larger checkpoint tensor, such as one expert's rows of all experts' weights.

    Args:
        name: the larger tensor's.
        shape: its shape.
        index: the part.
    """

    name: str
    shape: tuple[int, ...]
    index: Index


@dataclass(frozen=True)
class WeightSource:
    """``target.reshape(view)[index] = tensor.reshape(split).transpose(axes)``, broadcast like numpy does.

    Args:
        name: the tensor's Hugging Face name (GGUF names are translated first).
        shape: its shape in the checkpoint.
        target: the parameter it is (a part of).
        view: how the parameter's elements are seen for the assignment.
        index: the part of that view it fills.
        split: how the tensor's own dimensions are split first; default: not.
        aliases: further names under which checkpoints hold it.
        default: its value where the checkpoint lacks it; None: it must be there.
        axes: the order of the split dimensions in the view; default: as they are.
        within: where it lies in checkpoints that hold it as a part of a larger tensor instead.
    """

    name: str
    shape: tuple[int, ...]
    target: str
    view: tuple[int, ...]
    index: Index = (...,)
    split: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()
    default: float | None = None
    axes: tuple[int, ...] | None = None
    within: TensorPart | None = None

    def __post_init__(self) -> None:
        if self.split is not None and math.prod(self.split) != math.prod(self.shape):
            raise ValueError(f"{self.name}: split {self.split} does not hold shape {self.shape}")

    def name_in(self, names: Container[str]) -> str | None:
        """The name by which a checkpoint with these ``names`` holds the tensor (or what it is part of), or None."""
        found = next((name for name in (self.name, *self.aliases) if name in names), None)
        if found is None and self.within is not None and self.within.name in names:
            return self.within.name
        return found

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the tensor of this name (``name_in``) must have."""
        return self.within.shape if self.within is not None and name == self.within.name else self.shape

    def read(self, checkpoint: Checkpoint, name: str) -> np.ndarray:
        """The tensor, from the one of this name (``name_in``): a view where that is one."""
        tensor = checkpoint.read(name)
        return tensor[self.within.index] if self.within is not None and name == self.within.name else tensor

    def arranged(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor with its dimensions split and in the order of ``view``: a view of it."""
        split = tensor.reshape(self.shape if self.split is None else self.split)
        return split if self.axes is None else split.transpose(self.axes)

    def pieces(self, shape: tuple[int, ...], shard: Box) -> Iterator[Piece]:
        """What of this tensor lies in one shard of its parameter.

        Args:
            shape: the parameter's.
            shard: the part of it that is wanted.

        Raises:
            ValueError: ``view`` does not split the parameter's dimensions one by one.
        """
        wanted = self._index_ranges()
        cuts = [
            list(_cut(factors, *bounds))
            for factors, bounds in zip(_factors(self.view, shape), shard, strict=True)
        ]
        for boxes in itertools.product(*cuts):
            box = [bounds for ranges, _ in boxes for bounds in ranges]
            both = [(max(a, c), min(b, d)) for (a, b), ((c, d), _) in zip(box, wanted, strict=True)]
            if any(begin >= end for begin, end in both):
                continue
            kept = [not is_int for _, is_int in wanted]
            inside = [slice(b - low, e - low) for (b, e), (low, _) in zip(both, box, strict=True)]
            within = [slice(b - c, e - c) for (b, e), ((c, _), _) in zip(both, wanted, strict=True)]
            yield Piece(
                into=tuple(
                    slice(start - low, stop - low)
                    for (_, (start, stop)), (low, _) in zip(boxes, shard, strict=True)
                ),
                view=tuple(end - begin for begin, end in box),
                index=tuple(s if keep else s.start for s, keep in zip(inside, kept, strict=True)),
                part=self._part([s for s, keep in zip(within, kept, strict=True) if keep]),
            )

    def tensor_of(self, parameter: np.ndarray) -> np.ndarray:
        """The tensor out of the whole parameter that holds it: the way back."""
        held = parameter.reshape(self.view)[self.index]
        sizes = self._arranged_shape()
        held = held.reshape((1,) * (len(sizes) - held.ndim) + held.shape)
        once = (0,) * (held.ndim - len(sizes)) + tuple(slice(0, size) for size in sizes)
        held = held[once]
        if self.axes is not None:
            held = held.transpose(np.argsort(self.axes))
        return held.reshape(self.shape)

    def _arranged_shape(self) -> tuple[int, ...]:
        split = self.shape if self.split is None else self.split
        return split if self.axes is None else tuple(split[axis] for axis in self.axes)

    def _index_ranges(self) -> list[tuple[Range, bool]]:
        """``index`` as a range of each dimension of the view, and whether it was a number."""
        full = list(self.index)
        if Ellipsis in full:
            at = full.index(Ellipsis)
            full[at : at + 1] = [slice(None)] * (len(self.view) - len(full) + 1)
        full += [slice(None)] * (len(self.view) - len(full))
        ranges: list[tuple[Range, bool]] = []
        for entry, size in zip(full, self.view, strict=True):
            if isinstance(entry, slice):
                begin, end, step = entry.indices(size)
                if step != 1:
                    raise ValueError(f"{self.name}: index {self.index} has a step")
                ranges.append(((begin, end), False))
            else:
                assert isinstance(entry, int)
                number = range(size)[entry]
                ranges.append(((number, number + 1), True))
        return ranges

    def _part(self, within: list[slice]) -> tuple[slice, ...]:
        """Slices of the arranged tensor's dimensions, broadcast like numpy does: aligned right, 1 fits all."""
        sizes = self._arranged_shape()
        within = [slice(0, 1)] * (len(sizes) - len(within)) + within
        aligned = within[len(within) - len(sizes) :]
        return tuple(slice(0, 1) if size == 1 else part for size, part in zip(sizes, aligned, strict=True))


def _factors(view: Sequence[int], shape: Sequence[int]) -> list[list[int]]:
    """The dimensions of ``view`` that make up each one of ``shape``."""
    groups: list[list[int]] = []
    rest = list(view)
    for size in shape:
        group: list[int] = []
        while math.prod(group) < size and rest:
            group.append(rest.pop(0))
        groups.append(group)
    while rest and rest[0] == 1 and groups:
        groups[-1].append(rest.pop(0))
    if rest or any(math.prod(group) != size for group, size in zip(groups, shape, strict=True)):
        raise ValueError(
            f"view {tuple(view)} does not split the dimensions of shape {tuple(shape)} one by one"
        )
    return groups


def _cut(factors: Sequence[int], begin: int, end: int) -> Iterator[tuple[list[Range], Range]]:
    """A range of a dimension as boxes of its factors: (a range a factor, the stretch of the dimension that it is)."""
    if begin >= end:
        return
    if not factors:
        yield [], (begin, end)
        return
    inner = math.prod(factors[1:])
    first, last = -(-begin // inner), end // inner  # the first factor's whole entries
    if first > last:  # inside of one entry
        yield from _within(factors, first - 1, begin, end)
        return
    yield from _within(factors, first - 1, begin, first * inner)
    if first < last:
        yield (
            [(first, last), *((0, size) for size in factors[1:])],
            (first * inner, last * inner),
        )
    yield from _within(factors, last, last * inner, end)


def _within(factors: Sequence[int], entry: int, begin: int, end: int) -> Iterator[tuple[list[Range], Range]]:
    """``_cut`` of a range inside of one entry of the first factor."""
    offset = entry * math.prod(factors[1:])
    for ranges, (start, stop) in _cut(factors[1:], begin - offset, end - offset):
        yield [(entry, entry + 1), *ranges], (start + offset, stop + offset)

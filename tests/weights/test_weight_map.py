"""Shards of parameters are put together from the parts of tensors that lie in them; and the way back."""

import math
import random

import numpy as np
import pytest

from jaxserve.weights.weight_map import Box, WeightSource


def random_source(rng: random.Random) -> tuple[WeightSource, tuple[int, ...]]:
    """A source with every feature (split, broadcast, reordered, numbers and ranges in the index), and its parameter's
    shape."""
    factors = [[rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]
    shape = tuple(math.prod(group) for group in factors)
    view = tuple(size for group in factors for size in group)
    index, sizes = [], []
    for size in view:
        if rng.random() < 0.2:
            index.append(rng.randrange(size))
            continue
        begin = rng.randrange(size)
        end = rng.randint(begin + 1, size)
        index.append(slice(begin, end) if rng.random() < 0.5 else slice(None))
        sizes.append(len(range(size)[index[-1]]))
    arranged = [1 if rng.random() < 0.2 else size for size in sizes]
    axes = list(range(len(arranged)))
    rng.shuffle(axes)
    split = [0] * len(axes)
    for at, axis in enumerate(axes):
        split[axis] = arranged[at]
    source = WeightSource(
        "w", (math.prod(split),), "p", view, tuple(index), tuple(split), axes=tuple(axes) if axes else None
    )
    return source, shape


def whole_parameter(source: WeightSource, shape: tuple[int, ...], tensor: np.ndarray) -> np.ndarray:
    """What the class says that a source means, in one line of numpy."""
    parameter = np.zeros(shape, np.int64)
    parameter.reshape(source.view)[source.index] = source.arranged(tensor)
    return parameter


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    """Any box, aligned or not."""
    begins = [rng.randrange(size) for size in shape]
    return tuple((begin, rng.randint(begin, size)) for begin, size in zip(begins, shape, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_pieces_make_up_any_shard(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        source, shape = random_source(rng)
        tensor = np.arange(1, math.prod(source.shape) + 1)
        whole = whole_parameter(source, shape, tensor)
        box = random_box(rng, shape)
        shard = np.zeros([end - begin for begin, end in box], np.int64)
        for piece in source.pieces(shape, box):
            part = source.arranged(tensor)[piece.part]
            target = piece.target(shard)
            assert np.shares_memory(target, shard)
            assert not target.any(), "two pieces overlap"
            target[...] = part
        np.testing.assert_array_equal(shard, whole[tuple(slice(*bounds) for bounds in box)])


def test_the_way_back() -> None:
    rng = random.Random(7)
    for _ in range(300):
        source, shape = random_source(rng)
        tensor = np.arange(1, math.prod(source.shape) + 1)
        np.testing.assert_array_equal(source.tensor_of(whole_parameter(source, shape, tensor)), tensor)


def test_a_shard_needs_its_own_bytes_only() -> None:
    """Rows of gate and up on the second of two devices: half of each."""
    gate = WeightSource(
        "gate", (8, 5), "mlp", (2, 2, 4, 5), (..., slice(0, 1), slice(None), slice(None)), (2, 1, 4, 5)
    )
    (piece,) = gate.pieces((16, 5), ((8, 16), (0, 5)))
    assert gate.arranged(np.zeros((8, 5)))[piece.part].shape == (1, 1, 4, 5)
    assert piece.part[0] == slice(1, 2)


def test_a_view_across_dimensions_is_refused() -> None:
    source = WeightSource("w", (12,), "p", (4, 3))
    with pytest.raises(ValueError, match=r"view \(4, 3\) does not split the dimensions of shape \(3, 4\)"):
        list(source.pieces((3, 4), ((0, 3), (0, 4))))

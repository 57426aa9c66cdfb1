"""Loading: each shard of a parameter is assembled on the host from the bytes it needs, sent to its devices, and let go.

Host memory holds a few shards in flight (``IN_FLIGHT_BYTES`` of them, or one that is larger), never the checkpoint.
A device receives its own shards and nothing else; with several hosts, each reads what its own devices need.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint, open_checkpoint
from jaxserve.weights.resolve import ModelFiles
from jaxserve.weights.weight_map import Box, WeightSource
from sharding import DEFAULT_RULES, ParamSpec, ShardingRules, named_sharding

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each parameter."""

IN_FLIGHT_BYTES = 1 << 30
"""Host bytes of the shards that are assembled or on their way at a time."""
PIECE_BYTES = 32 << 20
"""Bytes of a mapped file that one thread copies before it lets go of their pages."""
ALIGNMENT = 64
"""Bytes: so aligned, a CPU device takes the host's buffer as it is, without a copy."""


def load_params(
    specs: Mapping[str, ParamSpec],
    weight_map: Sequence[WeightSource],
    files: ModelFiles,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Load a checkpoint into the parameters that ``specs`` declares, in their dtypes: see ``stream_params``.

    What was converted before goes through Orbax instead, without ``progress``.

    Raises:
        CheckpointError: a missing tensor, an unexpected shape, an unreadable type, a broken file.
    """
    if files.format == "orbax":
        from jaxserve.weights.orbax_store import restore_params

        return restore_params(files.path, specs, weight_map, mesh=mesh, rules=rules)
    checkpoint = open_checkpoint(files.path, files.format)
    check_tensors(checkpoint, weight_map, files)
    total = sum(spec.size_bytes for spec in specs.values())
    params: dict[str, jax.Array] = {}
    loaded = 0
    for name, value in stream_params(specs, weight_map, checkpoint, mesh=mesh, rules=rules):
        params[name] = value
        loaded += specs[name].size_bytes
        if progress is not None:
            progress(loaded, total)
    return params


def check_tensors(checkpoint: Checkpoint, weight_map: Sequence[WeightSource], files: ModelFiles) -> None:
    """Compare names and shapes before anything is read.

    Raises:
        CheckpointError: naming missing tensors, or one of another shape than the config implies.
    """
    available = set(checkpoint.names())
    found = [(source, source.name_in(available)) for source in weight_map]
    missing = [source.name for source, name in found if name is None and source.default is None]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{files.path} lacks the tensor {', '.join(missing[:3])}{more}.")
    for source, name in found:
        if name is None:
            continue
        shape = checkpoint.shape(name)
        expected = source.stored_shape(name)
        if shape != expected and (expected, shape) != ((), (1,)):
            raise CheckpointError(
                f"{files.path}: tensor {name} has shape {shape}; the config implies {expected}."
            )
    extra = sorted(available - {name for _, name in found})
    if extra:
        logger.info("Ignored %d tensor(s) that the model does not use: %s", len(extra), ", ".join(extra[:8]))


def stream_params(
    specs: Mapping[str, ParamSpec],
    weight_map: Sequence[WeightSource],
    checkpoint: Checkpoint,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
) -> Iterator[tuple[str, jax.Array]]:
    """Parameters in the order of ``specs``, each on its devices when it is handed out.

    Host memory: ``in_flight_bytes``, or one shard where it is larger, plus ``PIECE_BYTES`` a thread. Tensors that
    reading decodes count among what is in flight.

    Raises:
        CheckpointError: an unreadable type, or data that does not fit its header.
    """
    sources = sources_by_target(specs, weight_map)
    workers = min(8, os.cpu_count() or 1)
    room = _Room(in_flight_bytes)
    with concurrent.futures.ThreadPoolExecutor(workers, "weights") as pool:
        ahead: collections.deque[tuple[str, concurrent.futures.Future[jax.Array]]] = collections.deque()
        try:
            for name, spec in specs.items():
                needed = _host_bytes(spec, sources[name], checkpoint, mesh, rules)
                while ahead and not room.fits(needed):
                    first, future = ahead.popleft()
                    yield first, future.result()
                room.take(needed)
                future = pool.submit(_load_one, spec, sources[name], checkpoint, mesh, rules)
                future.add_done_callback(functools.partial(room.give, needed))
                ahead.append((name, future))
            while ahead:
                first, future = ahead.popleft()
                yield first, future.result()
        except BaseException:  # an error, or a caller that has enough: what has not begun need not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def sources_by_target(
    specs: Mapping[str, ParamSpec], weight_map: Sequence[WeightSource]
) -> dict[str, list[WeightSource]]:
    """The tensors of each parameter.

    Raises:
        CheckpointError: the two disagree about which parameters there are.
    """
    sources: dict[str, list[WeightSource]] = collections.defaultdict(list)
    for source in weight_map:
        sources[source.target].append(source)
    undeclared, unfilled = set(sources) - set(specs), set(specs) - set(sources)
    if undeclared or unfilled:
        raise CheckpointError(f"weight map and parameters disagree about {sorted(undeclared | unfilled)}.")
    return sources


class _Tensors:
    """The tensors of one parameter, each read once for all that is in it and for all shards."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.names, self.shape = checkpoint.names, checkpoint.shape
        self.read_bytes, self.release = checkpoint.read_bytes, checkpoint.release
        self.read = functools.cache(checkpoint.read)


class _Room:
    """Bytes that may be in flight; taken by one thread, given back by any."""

    def __init__(self, size: int) -> None:
        self._free, self._size, self._lock = size, size, threading.Lock()

    def fits(self, needed: int) -> bool:
        """Whether there is room; for more than there could ever be, once everything else is gone."""
        with self._lock:
            return needed <= self._free or self._free >= self._size

    def take(self, needed: int) -> None:
        with self._lock:
            self._free -= needed

    def give(self, needed: int, _: object) -> None:
        with self._lock:
            self._free += needed


def _host_bytes(
    spec: ParamSpec,
    sources: Sequence[WeightSource],
    checkpoint: Checkpoint,
    mesh: Mesh | None,
    rules: ShardingRules,
) -> int:
    """What loading a parameter takes on the host."""
    shape = spec.shape if mesh is None else named_sharding(mesh, spec.axes, rules).shard_shape(spec.shape)
    names = checkpoint.names()
    found = {name for source in sources if (name := source.name_in(names)) is not None}
    return math.prod(shape) * spec.dtype.itemsize + sum(map(checkpoint.read_bytes, found))


def _load_one(
    spec: ParamSpec,
    sources: Sequence[WeightSource],
    checkpoint: Checkpoint,
    mesh: Mesh | None,
    rules: ShardingRules,
) -> jax.Array:
    names = checkpoint.names()
    tensors = _Tensors(checkpoint)

    def read(source: WeightSource) -> np.ndarray:
        name = source.name_in(names)
        return np.asarray(source.default) if name is None else source.read(tensors, name)

    sharding = None if mesh is None else named_sharding(mesh, spec.axes, rules)
    return place_shards(spec, sources, read, sharding, checkpoint.release)


def place_shards(
    spec: ParamSpec,
    sources: Sequence[WeightSource],
    read: Callable[[WeightSource], np.ndarray],
    sharding: NamedSharding | None,
    release: Callable[[np.ndarray], None] = lambda view: None,
) -> jax.Array:
    """Assemble a parameter shard by shard, each on the host for only as long as it takes to send it.

    Args:
        spec: the parameter.
        sources: its tensors.
        read: gives a tensor, or a view of one that is mapped.
        sharding: None for this process's first device.
        release: called with each part of a tensor that has been copied.
    """
    if sharding is None:
        whole = tuple((0, size) for size in spec.shape)
        return jax.block_until_ready(jax.device_put(_assemble(spec, whole, sources, read, release)))
    devices: dict[Box, list[jax.Device]] = collections.defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
        assert index is not None
        box = tuple(part.indices(size)[:2] for part, size in zip(index, spec.shape, strict=True))
        devices[box].append(device)
    arrays: list[jax.Array] = []
    for box, holders in devices.items():
        shard = _assemble(spec, box, sources, read, release)
        arrays += jax.block_until_ready([jax.device_put(shard, device) for device in holders])
        del shard
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, arrays)


def _assemble(
    spec: ParamSpec,
    box: Box,
    sources: Sequence[WeightSource],
    read: Callable[[WeightSource], np.ndarray],
    release: Callable[[np.ndarray], None],
) -> np.ndarray:
    """One shard; parts that no tensor fills (padding of the vocabulary) are zero."""
    shard = _aligned_zeros(tuple(end - begin for begin, end in box), spec.dtype)
    for source in sources:
        pieces = list(source.pieces(spec.shape, box))
        if not pieces:
            continue
        tensor = read(source)
        arranged = tensor if tensor.ndim == 0 else source.arranged(tensor)  # a default fits every shape
        for piece in pieces:
            target = piece.target(shard)
            part = arranged[piece.part] if arranged.ndim else arranged
            _copy(target, part if target.ndim >= part.ndim else part.reshape(target.shape), release)
    return shard


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy(target: np.ndarray, part: np.ndarray, release: Callable[[np.ndarray], None]) -> None:
    """``target[...] = part``, in halves until one spans ``PIECE_BYTES`` of the file at most."""
    low, high = np.lib.array_utils.byte_bounds(part)
    axis = next((axis for axis, size in enumerate(part.shape) if size > 1), None)
    if high - low <= PIECE_BYTES or axis is None:
        target[...] = part
        release(part)
        return
    middle = part.shape[axis] // 2
    at = axis + target.ndim - part.ndim
    for half in (slice(0, middle), slice(middle, None)):
        ours = (slice(None),) * at + (half,)
        _copy(target[ours], part[(slice(None),) * axis + (half,)], release)

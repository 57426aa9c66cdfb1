"""Loading: each parameter is assembled on the host, sent to the devices, and let go."""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import Checkpoint, open_checkpoint
from jaxserve.weights.resolve import ModelFiles
from jaxserve.weights.weight_map import WeightSource
from sharding import DEFAULT_RULES, ParamSpec, ShardingRules, named_sharding

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after each parameter."""


def load_params(
    specs: Mapping[str, ParamSpec],
    weight_map: Sequence[WeightSource],
    files: ModelFiles,
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Load a checkpoint into the parameters that ``specs`` declares, in their dtypes.

    Host memory: the parameters in flight (a few), never the checkpoint. With a mesh, each device receives its
    shard only.

    Raises:
        CheckpointError: a missing tensor, an unexpected shape, an unreadable type, a broken file.
    """
    checkpoint = open_checkpoint(files.path, files.format)
    check_tensors(checkpoint, weight_map, files)
    total = sum(spec.size_bytes for spec in specs.values())
    params: dict[str, jax.Array] = {}
    loaded = 0
    for name, value in _assembled(specs, weight_map, checkpoint):
        params[name] = _to_device(value, specs[name], mesh, rules)
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


def _assembled(
    specs: Mapping[str, ParamSpec], weight_map: Sequence[WeightSource], checkpoint: Checkpoint
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters in order, a few of them assembled ahead in threads (numpy copies outside the GIL)."""
    sources: dict[str, list[WeightSource]] = collections.defaultdict(list)
    for source in weight_map:
        sources[source.target].append(source)
    undeclared, unfilled = set(sources) - set(specs), set(specs) - set(sources)
    if undeclared or unfilled:
        raise CheckpointError(f"weight map and parameters disagree about {sorted(undeclared | unfilled)}.")
    workers = min(8, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers, "weights") as pool:
        ahead: collections.deque[tuple[str, concurrent.futures.Future[np.ndarray]]] = collections.deque()
        for name, spec in specs.items():
            ahead.append((name, pool.submit(_assemble, spec, sources[name], checkpoint)))
            if len(ahead) > workers:
                first, future = ahead.popleft()
                yield first, future.result()
        while ahead:
            first, future = ahead.popleft()
            yield first, future.result()


def _assemble(spec: ParamSpec, sources: Sequence[WeightSource], checkpoint: Checkpoint) -> np.ndarray:
    """One parameter; parts that no tensor fills (padding of the vocabulary) are zero."""
    value = np.zeros(spec.shape, spec.dtype)
    names = checkpoint.names()
    for source in sources:
        name = source.name_in(names)
        source.place(value, np.asarray(source.default) if name is None else source.read(checkpoint, name))
    return value


def _to_device(value: np.ndarray, spec: ParamSpec, mesh: Mesh | None, rules: ShardingRules) -> jax.Array:
    if mesh is None:
        return jax.device_put(value)
    sharding = named_sharding(mesh, spec.axes, rules)
    return jax.make_array_from_callback(spec.shape, sharding, lambda index: value[index])

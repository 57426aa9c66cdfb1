"""The engine-ready form (fused, in one type, on one device's layout) on disk through Orbax, for fast restarts.

A store is written for one device, and restored onto any mesh. What it holds of each checkpoint tensor, and where, is
written beside it as ``WeightSource``s. Where the model at hand lays a parameter out alike, Orbax reads each device's
shards straight into place; where it does not (KV heads replicated, a vocabulary padded), the tensors are taken out of
the stored parameter and placed anew, one parameter at a time.

Parameters are saved in groups of about ``GROUP_BYTES``, so that neither writing nor reading holds more on the host.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from jaxserve.errors import CheckpointError
from jaxserve.weights.loader import place_shards, sources_by_target
from jaxserve.weights.resolve import LAYOUT_FILE
from jaxserve.weights.weight_map import Index, WeightSource
from sharding import DEFAULT_RULES, ParamSpec, ShardingRules, named_sharding

LAYOUT_VERSION = 2
GROUP_BYTES = 1 << 30


def save_params(
    folder: Path,
    specs: Mapping[str, ParamSpec],
    weight_map: Sequence[WeightSource],
    params: Iterable[tuple[str, jax.Array]],
) -> None:
    """Write ``params``, which may be made while they are taken; each is deleted once it is written.

    Args:
        folder: must hold no store yet.
        specs, weight_map: of a model for one device.
        params: (name, value), in any order.

    Raises:
        CheckpointError: the folder holds a store.
    """
    folder = folder.absolute()
    if (folder / LAYOUT_FILE).exists():
        raise CheckpointError(f"{folder} holds converted weights already: name a new folder, or remove it.")
    groups: dict[str, int] = {}
    waiting: dict[str, jax.Array] = {}
    number = 0
    for name, value in params:
        if waiting and sum(array.nbytes for array in waiting.values()) + value.nbytes > GROUP_BYTES:
            _save_group(folder, number, waiting)
            number, waiting = number + 1, {}
        waiting[name], groups[name] = value, number
    _save_group(folder, number, waiting)
    layout = {
        "version": LAYOUT_VERSION,
        "params": {
            name: {"dtype": spec.dtype.name, "shape": spec.shape, "group": groups[name]}
            for name, spec in specs.items()
        },
        "sources": [_source_to_json(source) for source in weight_map],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LAYOUT_FILE).write_text(json.dumps(layout))  # last: a folder without it is no store


def _save_group(folder: Path, number: int, params: Mapping[str, jax.Array]) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(_group_folder(folder, number), dict(params))
    for array in params.values():
        array.delete()


def restore_params(
    folder: Path,
    specs: Mapping[str, ParamSpec],
    weight_map: Sequence[WeightSource],
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
) -> dict[str, jax.Array]:
    """Read what ``save_params`` wrote into the layout, types and sharding of ``specs``, each device its own shards.

    Raises:
        CheckpointError: nothing was saved there, or not the tensors that ``weight_map`` wants.
    """
    folder = folder.absolute()
    store = _Store(folder)
    wanted = sources_by_target(specs, weight_map)
    store.check(weight_map)
    # In the order of specs, not of a set: all hosts read alike.
    alike = [name for name, spec in specs.items() if store.is_alike(name, spec, wanted[name])]
    groups: dict[int, list[str]] = collections.defaultdict(list)
    for name in alike:
        groups[store.params[name]["group"]].append(name)
    params: dict[str, jax.Array] = {}
    for number, names in groups.items():
        shardings = {name: _sharding(specs[name], mesh, rules) for name in names}
        params |= _restore_group(folder, number, {name: (specs[name], shardings[name]) for name in names})
    for name in [name for name in specs if name not in params]:
        sharding = None if mesh is None else named_sharding(mesh, specs[name].axes, rules)
        params[name] = place_shards(specs[name], wanted[name], store.reader(), sharding)
    return {name: params[name] for name in specs}


def _sharding(spec: ParamSpec, mesh: Mesh | None, rules: ShardingRules) -> jax.sharding.Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return named_sharding(mesh, spec.axes, rules)


def _restore_group(
    folder: Path, number: int, wanted: Mapping[str, tuple[ParamSpec, jax.sharding.Sharding]]
) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    arguments = {
        name: ocp.ArrayRestoreArgs(sharding=sharding, dtype=spec.dtype)
        for name, (spec, sharding) in wanted.items()
    }
    return _restore(folder, number, arguments)


def _restore(folder: Path, number: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    request = ocp.args.PyTreeRestore(
        item=dict.fromkeys(arguments, 0), restore_args=dict(arguments), partial_restore=True
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(_group_folder(folder, number), args=request)


def _group_folder(folder: Path, number: int) -> Path:
    return folder / "params" / f"{number:04}"


class _Store:
    """A store's own account of itself.

    Attributes:
        params: name -> dtype, shape and group.
        sources: tensor name -> where the store has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            layout = json.loads((folder / LAYOUT_FILE).read_text())
            if layout["version"] != LAYOUT_VERSION:
                raise CheckpointError(
                    f"{folder} was converted by another version of jaxserve (layout {layout['version']}; "
                    f"{LAYOUT_VERSION} is readable): convert the model again."
                )
            self.params: dict[str, Any] = layout["params"]
            sources = [_source_from_json(source) for source in layout["sources"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder} holds no weights converted by jaxserve: {error!r}") from error
        self.sources = {source.name: source for source in sources}
        self._by_target: dict[str, list[WeightSource]] = collections.defaultdict(list)
        for source in sources:
            self._by_target[source.target].append(source)

    def check(self, weight_map: Sequence[WeightSource]) -> None:
        """Compare names and shapes of tensors, as is done with other checkpoints."""
        for source in weight_map:
            stored = self.sources.get(source.name)
            if stored is None and source.default is None:
                raise CheckpointError(f"{self.folder} lacks the tensor {source.name}.")
            if stored is not None and stored.shape != source.shape:
                raise CheckpointError(
                    f"{self.folder}: tensor {source.name} has shape {stored.shape}; the config implies {source.shape}."
                )

    def is_alike(self, name: str, spec: ParamSpec, sources: Sequence[WeightSource]) -> bool:
        """Whether the stored parameter is laid out as the wanted one."""
        stored = self.params.get(name)
        if stored is None or tuple(stored["shape"]) != spec.shape:
            return False
        return list(map(_source_to_json, self._by_target[name])) == list(map(_source_to_json, sources))

    def reader(self) -> Any:
        """A function from a WeightSource to its tensor, which keeps the stored parameters that it has read."""

        @functools.cache
        def parameter(name: str) -> np.ndarray:
            import orbax.checkpoint as ocp

            arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
            return _restore(self.folder, self.params[name]["group"], arguments)[name]

        def read(source: WeightSource) -> np.ndarray:
            stored = self.sources.get(source.name)
            if stored is None:
                return np.asarray(source.default)
            return stored.tensor_of(parameter(stored.target))

        return read


def _source_to_json(source: WeightSource) -> dict[str, Any]:
    """Where a tensor is, without where checkpoints have it."""
    index = [[i.start, i.stop] if isinstance(i, slice) else "..." if i is ... else i for i in source.index]
    return {
        "name": source.name, "shape": list(source.shape), "target": source.target, "view": list(source.view),
        "index": index, "split": None if source.split is None else list(source.split),
        "axes": None if source.axes is None else list(source.axes),
    }  # fmt: skip


def _source_from_json(found: Mapping[str, Any]) -> WeightSource:
    index: Index = tuple(
        slice(*i) if isinstance(i, list) else ... if i == "..." else int(i) for i in found["index"]
    )
    split, axes = found["split"], found["axes"]
    return WeightSource(
        found["name"], tuple(found["shape"]), found["target"], tuple(found["view"]), index,
        None if split is None else tuple(split), axes=None if axes is None else tuple(axes),
    )  # fmt: skip

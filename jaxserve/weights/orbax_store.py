"""The engine-ready form (fused, in the compute type) on disk through Orbax, for fast restarts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from sharding import DEFAULT_RULES, ParamSpec, ShardingRules

LAYOUT_FILE = "jaxserve_layout.json"
LAYOUT_VERSION = 1


def save_params(
    folder: Path,
    specs: Mapping[str, ParamSpec],
    params: Mapping[str, jax.Array],
    *,
    tensor_parallel_size: int,
) -> None:
    """Write ``params``; ``folder`` must not exist yet. Fused parameters depend on the tensor-parallel size.

    Raises:
        CheckpointError: the folder exists.
    """
    import orbax.checkpoint as ocp

    folder = folder.absolute()
    if folder.exists():
        raise CheckpointError(f"{folder} exists already: name a new folder, or remove it.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "params", dict(params))
    layout = {
        "version": LAYOUT_VERSION,
        "tensor_parallel_size": tensor_parallel_size,
        "params": _layout(specs),
    }
    (folder / LAYOUT_FILE).write_text(json.dumps(layout))


def restore_params(
    folder: Path,
    specs: Mapping[str, ParamSpec],
    *,
    tensor_parallel_size: int,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
) -> dict[str, jax.Array]:
    """Read what ``save_params`` wrote, each device its own shards.

    Raises:
        CheckpointError: nothing was saved there, or the saved layout is not the one ``specs`` declares
            (another model, dtype or tensor-parallel size).
    """
    import orbax.checkpoint as ocp

    folder = folder.absolute()
    try:
        saved = json.loads((folder / LAYOUT_FILE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no parameters saved by jaxserve: {error}.") from error
    if saved.get("version") != LAYOUT_VERSION:
        raise CheckpointError(
            f"{folder} has layout version {saved.get('version')}; {LAYOUT_VERSION} is readable."
        )
    if saved["tensor_parallel_size"] != tensor_parallel_size:
        raise CheckpointError(
            f"{folder} was saved for tensor_parallel_size {saved['tensor_parallel_size']}, not "
            f"{tensor_parallel_size}."
        )
    wanted = _layout(specs)
    differing = sorted(
        k for k in wanted.keys() | saved["params"].keys() if wanted.get(k) != saved["params"].get(k)
    )
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{folder}: {len(differing)} parameter(s) differ from the model's; {name} is "
            f"{saved['params'].get(name)} there and {wanted.get(name)} here."
        )
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {name: spec.abstract(mesh, rules) for name, spec in specs.items()}
    if mesh is None:
        targets = {n: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=device) for n, t in targets.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / "params", targets)
    return {name: restored[name] for name in specs}


def _layout(specs: Mapping[str, ParamSpec]) -> dict[str, list[object]]:
    """Name to [dtype, shape], as JSON has it."""
    return {name: [spec.dtype.name, list(spec.shape)] for name, spec in specs.items()}

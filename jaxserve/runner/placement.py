"""Placement: where an engine's arrays lie, on one device or over a mesh, and how its programs run there.

A program is written for one device: its part of the weights, the rows, tokens and cache blocks of its data parallel
rank. On a mesh that function is the body of one ``shard_map`` over all axes. So whatever devices exchange is written
down in the model and the sampler, and the partitioner has nothing to decide.

Arrays of a rank are joined along their first axis (a cache's along its blocks): each device sees the shapes that it
would have alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.layers.params import DATA_AXIS, TENSOR_AXIS

REPLICATED = PartitionSpec()
BY_RANK = PartitionSpec(DATA_AXIS)
"""Parts of all ranks, joined along the first axis."""


def cache_spec(block_axis: int, *, split_heads: bool = True) -> PartitionSpec:
    """How a layer's cache lies: ranks have blocks of their own, tensor-parallel devices have heads (axis 2)."""
    axes: list[str | None] = [None, None, TENSOR_AXIS if split_heads else None]
    axes[block_axis] = DATA_AXIS
    return PartitionSpec(*axes)


@dataclass(frozen=True)
class Placement:
    """One device, or a mesh with the axes ``data`` and ``model``.

    Args:
        mesh: None for one device.
        compiler_options: of every program.
    """

    mesh: Mesh | None = None
    compiler_options: tuple[tuple[str, Any], ...] = ()

    @property
    def num_ranks(self) -> int:
        """Data parallel ranks."""
        return 1 if self.mesh is None else self.mesh.shape[DATA_AXIS]

    @property
    def devices(self) -> list[jax.Device]:
        """In the mesh's order."""
        return jax.local_devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def local_devices(self) -> list[jax.Device]:
        """Those of this process."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @functools.cached_property
    def _in_one_process(self) -> bool:
        return self.mesh is None or len(self.local_devices) == len(self.devices)

    def abstract(self, local: Any, specs: Any) -> Any:
        """The whole array's shape and sharding, from one device's shape.

        Args:
            local: pytree of ShapeDtypeStructs as one device sees them.
            specs: PartitionSpec of each leaf, or a prefix of the tree.
        """
        if self.mesh is None:
            return local
        return jax.tree.map(
            lambda spec, part: jax.tree.map(functools.partial(self._join, spec=spec), part), specs, local,
            is_leaf=_is_spec,
        )  # fmt: skip

    def _join(self, leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        assert self.mesh is not None
        shape = list(leaf.shape)
        for axis, names in enumerate(spec):
            names = (names,) if isinstance(names, str) else names or ()
            shape[axis] *= math.prod(self.mesh.shape[name] for name in names)
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=NamedSharding(self.mesh, spec))

    def jit(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *, donate: Sequence[int] = ()
    ) -> Any:
        """``jax.jit`` of a function that is written for one device.

        Args:
            function: positional arguments and the result are pytrees of that device's parts.
            in_specs: one for each argument; out_specs: of the result.
            donate: arguments that the result takes the place of.
        """
        mesh, options = self.mesh, dict(self.compiler_options) or None
        if mesh is None:
            return jax.jit(function, donate_argnums=tuple(donate), compiler_options=options)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=_is_spec)
        return jax.jit(
            mapped, donate_argnums=tuple(donate), out_shardings=shardings, compiler_options=options
        )

    def zeros(self, abstract: Any) -> Any:
        """Arrays of zeros in these shapes and shardings."""
        return jax.tree.map(lambda leaf: _zeros(leaf.shape, jnp.dtype(leaf.dtype), leaf.sharding), abstract)

    def put_all(self, parts: Sequence[np.ndarray]) -> jax.Array | np.ndarray:
        """What each rank is told, as an argument of a compiled program: an equally large part for each.

        One process's programs take the host's array as it is, and send it themselves: that costs the host a fraction of
        what ``device_put`` does. It must not be changed any more.
        """
        value = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return value if self._in_one_process else self.put(value)

    def put_for(self, rank: int, value: np.ndarray, idle: int = 0) -> jax.Array | np.ndarray:
        """What one rank is told, likewise; the others get ``idle`` throughout."""
        parts = [np.full_like(value, idle)] * self.num_ranks
        parts[rank] = value
        return self.put_all(parts)

    def put(self, value: np.ndarray, spec: PartitionSpec = BY_RANK) -> jax.Array:
        """A host array of all ranks' parts, to the devices."""
        if self.mesh is None:
            return jax.device_put(value)
        sharding = NamedSharding(self.mesh, spec)
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        # device_put would compare the value over all processes.
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)


@functools.lru_cache(maxsize=64)
def _zeros_program(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> jax.Array:
    return jnp.zeros(shape, dtype) if sharding is None else _zeros_program(shape, dtype, sharding)()

"""From logical axes to shardings: of arrays that exist, and of values inside a jitted function."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from sharding.rules import DEFAULT_RULES, ShardingRules


def named_sharding(
    mesh: Mesh, axes: Sequence[str | None], rules: ShardingRules = DEFAULT_RULES
) -> NamedSharding:
    """The sharding of an array whose dimensions carry these logical axes."""
    return NamedSharding(mesh, rules.partition_spec(axes))


def constrain(
    value: jax.Array, axes: Sequence[str | None], mesh: Mesh | None, rules: ShardingRules = DEFAULT_RULES
) -> jax.Array:
    """Tell the partitioner how ``value`` is split inside a jitted function; a no-op without a mesh."""
    if mesh is None or mesh.size == 1:
        return value
    return jax.lax.with_sharding_constraint(value, named_sharding(mesh, axes, rules))

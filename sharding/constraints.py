"""From logical axes to the shardings of arrays."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding

from sharding.rules import DEFAULT_RULES, ShardingRules


def named_sharding(
    mesh: Mesh, axes: Sequence[str | None], rules: ShardingRules = DEFAULT_RULES
) -> NamedSharding:
    """The sharding of an array whose dimensions carry these logical axes."""
    return NamedSharding(mesh, rules.partition_spec(axes))

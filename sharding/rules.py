"""ShardingRules: which mesh axis splits each logical axis. Models name logical axes; this is the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis to mesh axis (``data``, ``model``, ``expert``); None keeps the dimension whole.

    The defaults are Megatron's tensor parallelism: heads and the feed-forward size are split, so that
    attention and the feed-forward need one all-reduce each; the vocabulary is split for the embedding and
    the logits.
    """

    embed: str | None = None
    """Hidden size M."""
    vocab: str | None = "model"
    """Vocabulary V, of the embedding's rows and the logits' columns."""
    heads: str | None = "model"
    """Query heads H."""
    kv_heads: str | None = "model"
    """Key/value heads K (replicated ones included), and with them their groups of query heads."""
    head_dim: str | None = None
    """Head size D."""
    ffn: str | None = "model"
    """Feed-forward size F."""
    expert: str | None = "expert"
    """Experts E."""
    layers: str | None = None
    """Layers L, of small vectors stacked over the layers."""
    tokens: str | None = None
    """Tokens T of a step, or its rows R."""

    def mesh_axis(self, logical_axis: str) -> str | None:
        """The mesh axis of a logical one.

        Raises:
            KeyError: for a name that is no logical axis.
        """
        if logical_axis not in LOGICAL_AXES:
            raise KeyError(
                f"{logical_axis!r} is no logical axis; known are {', '.join(sorted(LOGICAL_AXES))}"
            )
        return getattr(self, logical_axis)

    def partition_spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The PartitionSpec of dimensions that carry these logical axes; each mesh axis splits one at most.

        Raises:
            ValueError: when two dimensions would be split over the same mesh axis.
        """
        mesh_axes = [None if axis is None else self.mesh_axis(axis) for axis in axes]
        used = [axis for axis in mesh_axes if axis is not None]
        if len(set(used)) != len(used):
            raise ValueError(
                f"logical axes {tuple(axes)} map to mesh axes {tuple(mesh_axes)}: one is used twice"
            )
        return PartitionSpec(*mesh_axes)


LOGICAL_AXES = frozenset(field.name for field in dataclasses.fields(ShardingRules))
DEFAULT_RULES = ShardingRules()

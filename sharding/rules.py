"""ShardingRules: which mesh axis splits each logical axis. Models name logical axes; this is the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

MeshAxis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis to mesh axis (``data``, ``model``, or several); None keeps the dimension whole.

    The defaults are Megatron's tensor parallelism: heads and the feed-forward size are split, so that
    attention and the feed-forward need one all-reduce each; the vocabulary is split for the embedding and
    the logits.
    """

    embed: MeshAxis = None
    """Hidden size M."""
    vocab: MeshAxis = "model"
    """Vocabulary V, of the embedding's rows and the logits' columns."""
    heads: MeshAxis = "model"
    """Query heads H."""
    kv_heads: MeshAxis = "model"
    """Key/value heads K (replicated ones included), and with them their groups of query heads."""
    head_dim: MeshAxis = None
    """Head size D."""
    ffn: MeshAxis = "model"
    """Feed-forward size F."""
    expert: MeshAxis = None
    """Experts E: over all devices under expert parallelism (``for_experts``), else whole."""
    expert_ffn: MeshAxis = "model"
    """Feed-forward size of one expert."""
    layers: MeshAxis = None
    """Layers L, of small vectors stacked over the layers."""

    def for_experts(self) -> ShardingRules:
        """These rules under expert parallelism: each device holds whole experts."""
        return dataclasses.replace(self, expert=("data", "model"), expert_ffn=None)

    def mesh_axis(self, logical_axis: str) -> MeshAxis:
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
        used = [name for axis in mesh_axes for name in ((axis,) if isinstance(axis, str) else axis or ())]
        if len(set(used)) != len(used):
            raise ValueError(
                f"logical axes {tuple(axes)} map to mesh axes {tuple(mesh_axes)}: one is used twice"
            )
        return PartitionSpec(*mesh_axes)


LOGICAL_AXES = frozenset(field.name for field in dataclasses.fields(ShardingRules))
DEFAULT_RULES = ShardingRules()

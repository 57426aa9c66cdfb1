"""Norm weights and biases, stacked over the layers: every array costs time at dispatch."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxserve.layers.params import LayerContext


@dataclass(frozen=True)
class LayerVectors:
    """One layer's vectors; None where the model has none. Biases are in their matrix's column order."""

    input_norm: jax.Array
    """[M]"""
    mlp_norm: jax.Array
    """[M]"""
    qk_norm: jax.Array | None = None
    """[G + 1, D]: the query heads' weight G times, then the key's."""
    qkv_bias: jax.Array | None = None
    """[K (G + 2) D]"""
    out_bias: jax.Array | None = None
    """[M]"""
    gate_up_bias: jax.Array | None = None
    """[2 F]"""
    down_bias: jax.Array | None = None
    """[M]"""


class StackedVectors(nnx.Module):
    """The same for all L layers: every array is [L, ...]."""

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        context: LayerContext,
        *,
        qk_norm_shape: tuple[int, int] | None = None,
        qkv_bias_size: int | None = None,
        out_bias: bool = False,
        gate_up_bias_size: int | None = None,
    ) -> None:
        def norm(*shape: int) -> nnx.Param[jax.Array]:
            axes = ("layers",) + (None,) * len(shape)
            return context.param((num_layers, *shape), axes, scale=0.0, mean=1.0)

        def bias(size: int | None, axis: str) -> nnx.Param[jax.Array] | None:
            return None if size is None else context.param((num_layers, size), ("layers", axis), scale=0.0)

        self.input_norm = norm(hidden_size)
        self.mlp_norm = norm(hidden_size)
        self.qk_norm = None if qk_norm_shape is None else norm(*qk_norm_shape)
        self.qkv_bias = bias(qkv_bias_size, "kv_heads")
        self.out_bias = bias(hidden_size if out_bias else None, "embed")
        self.gate_up_bias = bias(gate_up_bias_size, "ffn")
        self.down_bias = bias(None if gate_up_bias_size is None else hidden_size, "embed")

    def of(self, layer: int) -> LayerVectors:
        """The vectors of one layer."""
        stacked = {name: getattr(self, name) for name in LayerVectors.__dataclass_fields__}
        return LayerVectors(**{name: value[layer] for name, value in stacked.items() if value is not None})

"""The gated feed-forward: down(silu(gate(x)) * up(x)), gate and up as one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear
from jaxserve.layers.params import LayerContext, value_of


def check_ffn_size(ffn_size: int, tensor_parallel_size: int) -> None:
    """Refuse a feed-forward size that cannot be split evenly.

    Raises:
        ConfigError: naming both.
    """
    if ffn_size % tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the feed-forward size {ffn_size}.",
            param="tensor_parallel_size",
        )


class GatedMLP(nnx.Module):
    """Weights [2 F, M] and [M, F].

    The first holds, per device of the tensor-parallel group, that device's rows of gate, then those of
    up: split over the devices, each keeps matching halves.
    """

    def __init__(self, hidden_size: int, ffn_size: int, context: LayerContext, *, bias: bool = False) -> None:
        self.gate_up = context.param((2 * ffn_size, hidden_size), ("ffn", "embed"))
        self.gate_up_bias = context.param((2 * ffn_size,), ("ffn",), scale=0.0) if bias else None
        self.down = context.param((hidden_size, ffn_size), ("embed", "ffn"))
        self.down_bias = context.param((hidden_size,), ("embed",), scale=0.0) if bias else None
        self.ffn_size = ffn_size
        self.context = context

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, M] to [T, M]."""
        gate_up = linear(
            x, self.gate_up[...], value_of(self.gate_up_bias), weight_first=self.context.weight_first
        )
        gate_up = self.context.constrain(gate_up, ("tokens", "ffn"))
        devices = self.context.tensor_parallel_size
        halves = gate_up.reshape(-1, devices, 2, self.ffn_size // devices).astype(jnp.float32)
        activated = (jax.nn.silu(halves[:, :, 0]) * halves[:, :, 1]).astype(x.dtype)
        return linear(
            activated.reshape(-1, self.ffn_size), self.down[...], value_of(self.down_bias),
            weight_first=self.context.weight_first,
        )  # fmt: skip

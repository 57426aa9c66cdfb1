"""The gated feed-forward: down(silu(gate(x)) * up(x)), gate and up as one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import gated_linear, linear, onto_stream, split_linear
from jaxserve.layers.params import LayerContext, StreamNorm, value_of

MOST_LISTED = 64
"""The largest ``tensor_parallel_size`` that a message offers."""


def check_ffn_size(ffn_size: int, tensor_parallel_size: int) -> None:
    """Refuse a feed-forward size that cannot be split evenly.

    Raises:
        ConfigError: naming both.
    """
    if ffn_size % tensor_parallel_size:
        valid = ", ".join(str(size) for size in range(1, MOST_LISTED + 1) if ffn_size % size == 0)
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the feed-forward size {ffn_size}. "
            f"These do: {valid}.",
            param="tensor_parallel_size",
        )


class GatedMLP(nnx.Module):
    """Weights [2, F, M], gate's and up's, which are one product, and [M, F]."""

    def __init__(self, hidden_size: int, ffn_size: int, context: LayerContext, *, bias: bool = False) -> None:
        self.gate_up = context.param((2, ffn_size, hidden_size), (None, "ffn", "embed"))
        self.gate_up_bias = context.param((2, ffn_size), (None, "ffn"), scale=0.0) if bias else None
        self.down = context.param((hidden_size, ffn_size), ("embed", "ffn"))
        self.down_bias = context.param((hidden_size,), ("embed",), scale=0.0) if bias else None
        self.context = context

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, M] to [T, M], or to this device's tokens of it where tokens are shared."""
        return split_linear(self.activated(x), self.down[...], value_of(self.down_bias), self.context)

    def onto(self, x: jax.Array, stream: StreamNorm) -> tuple[jax.Array, jax.Array]:
        """The residual stream with that added, and its norms, [T, M]."""
        bias = value_of(self.down_bias)
        return onto_stream(self.activated(x), self.down[...], bias, self.context, stream)

    def activated(self, x: jax.Array) -> jax.Array:
        """[T, M] to silu(gate) * up, [T, F / devices]."""
        bias, weight = value_of(self.gate_up_bias), self.gate_up[...].reshape(-1, x.shape[1])
        if bias is None and (activated := gated_linear(x, weight, self.context)) is not None:
            return activated
        gate_up = linear(
            x, weight, None if bias is None else bias.reshape(-1), weight_first=self.context.weight_first,
            kernel=self.context.dense_matmul,
        )  # fmt: skip
        halves = gate_up.reshape(x.shape[0], 2, -1).astype(jnp.float32)
        return (jax.nn.silu(halves[:, 0]) * halves[:, 1]).astype(x.dtype)

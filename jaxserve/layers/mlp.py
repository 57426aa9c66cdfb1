"""The gated feed-forward: down(silu(gate(x)) * up(x)), gate and up as one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import linear
from jaxserve.layers.params import LayerContext


class GatedMLP(nnx.Module):
    """Weights [M, 2, F] (gate, up) and [F, M]."""

    def __init__(self, hidden_size: int, ffn_size: int, context: LayerContext) -> None:
        self.gate_up = context.param((hidden_size, 2, ffn_size), ("embed", None, "ffn"))
        self.down = context.param((ffn_size, hidden_size), ("ffn", "embed"))
        self.context = context

    def __call__(
        self, x: jax.Array, gate_up_bias: jax.Array | None = None, down_bias: jax.Array | None = None
    ) -> jax.Array:
        """[T, M] to [T, M]; biases [2, F] and [M]."""
        gate_up = linear(x, self.gate_up[...], "tm,mnf->tnf", gate_up_bias)
        gate_up = self.context.constrain(gate_up, ("tokens", None, "ffn"))
        gate, up = gate_up[:, 0], gate_up[:, 1]
        activated = (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype)
        return linear(activated, self.down[...], "tf,fm->tm", down_bias)

"""Gate and up as one grouped product, and their activation after it: for whoever has no kernel that does both."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def gated(
    multiply: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    lhs: jax.Array,
    gate_up: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """[N, F] in lhs's type: silu(gate) * up; arguments as ``dispatch.GroupedMatmul.gated``'s."""
    num_groups, _, ffn_size, inner = gate_up.shape
    both = multiply(lhs, gate_up.reshape(num_groups, 2 * ffn_size, inner), group_sizes)
    halves = both.reshape(lhs.shape[0], 2, ffn_size).astype(jnp.float32)
    return (jax.nn.silu(halves[:, 0]) * halves[:, 1]).astype(lhs.dtype)

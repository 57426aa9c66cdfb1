"""Logits processors: what changes a row's logits before one is chosen.

Each is a function ``(logits float32[R, V], metadata, state) -> float32[R, V]`` that returns a row unchanged,
bit for bit, where the row does not ask for it. ``PROCESSORS`` is their order: masks, logit_bias, penalties.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.metadata import Feature, SamplingMetadata
from jaxserve.sampling.state import MAX_COUNT, SamplerState

Processor = Callable[[jax.Array, SamplingMetadata, SamplerState], jax.Array]


def apply_token_mask(logits: jax.Array, metadata: SamplingMetadata, state: SamplerState) -> jax.Array:
    """-inf where the row's token mask has a 0."""
    words = state.token_mask.at[metadata.row_ids].get(mode="clip")
    words = jnp.where(metadata.use_mask[:, None] != 0, words, -1)
    bits = lax.shift_right_logical(words[:, :, None], lax.broadcasted_iota(jnp.int32, (1, 1, 32), 2)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed, logits, -jnp.inf)


def apply_logit_bias(logits: jax.Array, metadata: SamplingMetadata, state: SamplerState) -> jax.Array:
    """Add the row's logit_bias entries."""

    def add(logits: jax.Array) -> jax.Array:
        ids = state.bias_ids.at[metadata.row_ids].get(mode="clip")
        values = state.bias_values.at[metadata.row_ids].get(mode="clip")
        entry = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
        ids = jnp.where((entry < metadata.num_bias[:, None]) & (ids >= 0), ids, logits.shape[1])
        rows = lax.broadcasted_iota(jnp.int32, ids.shape, 0)
        return logits.at[rows, ids].add(values, mode="drop")

    return lax.cond(metadata.any(Feature.BIAS), add, lambda logits: logits, logits)


def apply_penalties(logits: jax.Array, metadata: SamplingMetadata, state: SamplerState) -> jax.Array:
    """Repetition over prompt and output; frequency and presence over the output."""
    history = state.history.at[metadata.row_ids].get(mode="clip").astype(jnp.int32)
    asks = metadata.rows_with(Feature.PENALTY)[:, None]
    history = jnp.where(asks, history, 0)
    count = history & MAX_COUNT
    repetition = jnp.where(history != 0, metadata.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - metadata.frequency_penalty[:, None] * count.astype(jnp.float32)
    return logits - jnp.where(count > 0, metadata.presence_penalty[:, None], 0.0)


PROCESSORS: tuple[Processor, ...] = (apply_token_mask, apply_logit_bias, apply_penalties)
PROCESSOR_FEATURES = Feature.MASK | Feature.BIAS | Feature.PENALTY
"""A step in which no row asks for any of these skips all processors."""


def process_logits(logits: jax.Array, metadata: SamplingMetadata, state: SamplerState) -> jax.Array:
    """Run every processor, or none when no row asks for any."""

    def run(logits: jax.Array) -> jax.Array:
        for processor in PROCESSORS:
            logits = processor(logits, metadata, state)
        return logits

    return lax.cond(metadata.any(PROCESSOR_FEATURES), run, lambda logits: logits, logits)

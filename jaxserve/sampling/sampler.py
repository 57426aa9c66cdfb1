"""sample: one token per row from the step's logits, all on the device, in one program for every mix of parameters.

Work that no row asks for is skipped by ``lax.cond``; what a row gets depends on its own logits and parameters alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.filters import find_threshold
from jaxserve.sampling.fixed_point import CHUNK, MAX_VOCAB, exp_shifted, pick, sum_exact, weights
from jaxserve.sampling.logits_processors import PROCESSOR_FEATURES, process_logits
from jaxserve.sampling.logprobs import LogprobArrays, compute_logprobs, no_logprobs
from jaxserve.sampling.metadata import ALL_FEATURES, Feature, SamplingMetadata
from jaxserve.sampling.random_bits import row_random_bits
from jaxserve.sampling.state import SamplerState, record_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerOutput:
    """What one step sampled."""

    token_ids: jax.Array
    """int32[R]; -1 for a row that left no token to choose: every logit NaN or -inf (a broken model)."""
    logprobs: LogprobArrays
    """Of the sampled tokens, shapes [R] and [R, max_logprobs]; zeros unless a row asked for logprobs."""


def sample(
    logits: jax.Array,
    metadata: SamplingMetadata,
    state: SamplerState,
    *,
    max_logprobs: int,
    greedy_only: bool = False,
    features: Feature = ALL_FEATURES,
) -> tuple[SamplerOutput, SamplerState]:
    """Choose one token per row, remember it, and score it.

    Args:
        logits: float32[R, V], as the model gave them. Rows of padding may hold anything.
        metadata: how to sample each row.
        state: donated by the caller's program.
        max_logprobs: static: most likely tokens listed per row, in [0, V].
        greedy_only: static: short for ``features=Feature.NONE``.
        features: static: what this program can serve; a step goes to a program whose features include its own
            (``step_features``). All by default: one program for everything. Where a branch costs a round trip to
            the host, compile ``Feature.NONE`` (the argmax) and ``Feature.RANDOM`` as well: they have no branches.

    Returns:
        the output, and the state with ``last_token_ids`` (and the output's counts, where the program knows of
        penalties) updated. A row of which nothing could be sampled (token -1) is remembered as token 0.
    """
    features = Feature.NONE if greedy_only else features
    num_rows, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"Vocabularies of up to {MAX_VOCAB} tokens can be sampled, not {vocab_size}.")
    branch = functools.partial(_branch, features, metadata)

    def choose(logits: jax.Array) -> jax.Array:
        logits = branch(PROCESSOR_FEATURES, lambda x: process_logits(x, metadata, state), lambda x: x, logits)
        maximum, greedy = argmax(logits)

        def draw(logits: jax.Array) -> jax.Array:
            return jnp.where(
                (metadata.temperature > 0) & (greedy >= 0), draw_token(logits, maximum, metadata), greedy
            )

        return branch(Feature.RANDOM, draw, lambda logits: greedy, logits)

    token_ids = branch(Feature.RANDOM | PROCESSOR_FEATURES, choose, lambda x: argmax(x)[1], logits)
    remembered = jnp.maximum(token_ids, 0)
    logprobs = branch(
        Feature.LOGPROBS,
        lambda logits, ids: compute_logprobs(logits, ids, max_logprobs),
        lambda logits, ids: no_logprobs(num_rows, max_logprobs),
        logits,
        remembered,
    )
    state = record_tokens(state, metadata.row_ids, remembered, count=bool(features & Feature.PENALTY))
    return SamplerOutput(token_ids, logprobs), state


def _branch(
    compiled: Feature,
    metadata: SamplingMetadata,
    wanted: Feature,
    then: Callable[..., Any],
    otherwise: Callable[..., Any],
    *operands: jax.Array,
) -> Any:
    """``then`` where the step asks for any of ``wanted``; decided while tracing if the program leaves no choice."""
    if not compiled & wanted:
        return otherwise(*operands)
    if not compiled & ~wanted:
        return then(*operands)
    return lax.cond(metadata.any(wanted), then, otherwise, *operands)


def argmax(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's largest number and its lowest id (-1: the row holds none). NaN counts as -inf.

    One vectorizable pass finds the chunks' maxima; only the first chunk that holds the row's is looked at again.
    """
    numbers = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    padding = -logits.shape[1] % CHUNK
    if padding:
        numbers = jnp.pad(numbers, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    chunks = numbers.reshape(logits.shape[0], -1, CHUNK)
    maxima = jnp.max(chunks, axis=-1)
    maximum = jnp.max(maxima, axis=-1)
    chunk = _first_equal(maxima, maximum)
    within = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1, mode="clip")[:, 0]
    token = chunk * CHUNK + _first_equal(within, maximum)
    return maximum, jnp.where(maximum > -jnp.inf, token, -1)


def _first_equal(values: jax.Array, wanted: jax.Array) -> jax.Array:
    ids = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.min(jnp.where(values == wanted[:, None], ids, values.shape[1] - 1), axis=-1)


def draw_token(logits: jax.Array, maximum: jax.Array, metadata: SamplingMetadata) -> jax.Array:
    temperature = jnp.where(metadata.temperature > 0, metadata.temperature, 1.0)
    exponentials = exp_shifted(logits, maximum, temperature)
    values, scale = weights(exponentials, sum_exact(exponentials))
    values = lax.optimization_barrier(values)  # computed once: every later pass must see the same integers
    threshold = find_threshold(
        values, scale, metadata.top_k, metadata.top_p, metadata.min_p, metadata.temperature > 0
    )
    kept = jnp.where(values >= threshold[:, None], values, 0)
    return pick(kept, row_random_bits(metadata.seed_lo, metadata.seed_hi, metadata.positions))

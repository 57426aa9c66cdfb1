"""sample: one token per row from the step's logits, by one program for every mix of parameters.

Work that no row asks for is skipped by ``lax.cond``, or left out of the program (``features``). What a row gets
depends on its own logits, parameters, seed and position alone, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.draw import Bits, draw_from_all, draw_from_top, random_bits
from jaxserve.sampling.fixed_point import MAX_VOCAB
from jaxserve.sampling.logits_processors import PROCESSOR_FEATURES, process_logits
from jaxserve.sampling.logprobs import LogprobArrays, compute_logprobs, no_logprobs
from jaxserve.sampling.metadata import ALL_FEATURES, Feature, SamplingMetadata
from jaxserve.sampling.state import SamplerState, record_tokens
from jaxserve.sampling.top_tokens import chunk_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerOutput:
    """What one step sampled."""

    token_ids: jax.Array
    """int32[R]; -1 for a row that left no token to choose: its logits are NaN or -inf (a broken model)."""
    logprobs: LogprobArrays | None
    """Of the sampled tokens, shapes [R] and [R, max_logprobs]; zeros unless a row asked for logprobs. ``sample`` gives
    them; a program that can't serve them may leave them out."""
    expert_imbalance: tuple[jax.Array, ...] = ()
    """Not the sampler's, but it leaves the device with the tokens: float32[1] of the step, if the model has experts."""


def sample(
    logits: jax.Array,
    metadata: SamplingMetadata,
    state: SamplerState,
    *,
    max_logprobs: int,
    features: Feature = ALL_FEATURES,
) -> tuple[SamplerOutput, SamplerState]:
    """Choose one token per row, remember it, and score it.

    Args:
        logits: float32[R, V], as the model gave them. Rows of padding may hold anything; a NaN elsewhere
            spoils its own row: its token is -1 or arbitrary.
        metadata: how to sample each row.
        state: donated by the caller's program.
        max_logprobs: static: most likely tokens listed per row, in [0, V].
        features: static: what this program can serve; a step goes to a program whose features include its
            own (``step_features``). All by default: one program for everything. Where a branch costs a round
            trip to the host, compile further programs for a single feature: they hold no branch.

    Returns:
        the output, and the state with ``last_token_ids`` (and the output's counts, where the program knows of
        penalties) updated. A row of which nothing could be sampled (token -1) is remembered as token 0.
    """
    output = choose(logits, metadata, state, max_logprobs=max_logprobs, features=features)
    return output, remember(output, metadata, state, features)


def choose(
    logits: jax.Array,
    metadata: SamplingMetadata,
    state: SamplerState,
    *,
    max_logprobs: int,
    features: Feature,
) -> SamplerOutput:
    """``sample`` without remembering."""
    num_rows, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"Vocabularies of up to {MAX_VOCAB} tokens can be sampled, not {vocab_size}.")
    branch = functools.partial(_branch, features, metadata)
    # Outside of the branches, and so computed once: XLA would fuse them into whatever reads them.
    bits = random_bits(metadata, 0)
    process = functools.partial(_process, features, metadata, state, bits)
    token_ids = branch(ALL_FEATURES & ~Feature.LOGPROBS, process, _greedy, logits)
    logprobs = branch(
        Feature.LOGPROBS,
        lambda logits, ids: compute_logprobs(logits, ids, max_logprobs),
        lambda logits, ids: no_logprobs(num_rows, max_logprobs),
        logits,
        jnp.maximum(token_ids, 0),
    )
    return SamplerOutput(token_ids, logprobs)


def remember(
    output: SamplerOutput, metadata: SamplingMetadata, state: SamplerState, features: Feature
) -> SamplerState:
    """Note what the rows sampled, and count it where the program knows of penalties."""
    token_ids = jnp.maximum(output.token_ids, 0)
    return record_tokens(state, metadata.row_ids, token_ids, count=bool(features & Feature.PENALTY))


def _branch(
    compiled: Feature,
    metadata: SamplingMetadata,
    wanted: Feature,
    then: Callable[..., Any],
    otherwise: Callable[..., Any],
    *operands: Any,
) -> Any:
    """``then`` if the step asks for any of ``wanted``; decided while tracing where the program has no choice."""
    if not compiled & wanted:
        return otherwise(*operands)
    if not compiled & ~wanted:
        return then(*operands)
    return lax.cond(metadata.any(wanted), then, otherwise, *operands)


def _greedy(logits: jax.Array) -> jax.Array:
    """int32[R]: each row's largest logit, the lowest id of equal ones; -1 if it holds no number."""

    def by_chunks(logits: jax.Array) -> jax.Array:
        return chunk_logits(logits).argmax  # XLA's own argmax is 15 times slower on a CPU

    def at_once(logits: jax.Array) -> jax.Array:
        token = lax.argmax(logits, 1, jnp.int32)
        best = jnp.take_along_axis(logits, token[:, None], axis=1, mode="clip")[:, 0]
        return jnp.where(best > -jnp.inf, token, -1)

    return lax.platform_dependent(logits, cpu=by_chunks, default=at_once)


def _process(
    features: Feature, metadata: SamplingMetadata, state: SamplerState, bits: Bits, logits: jax.Array
) -> jax.Array:
    """int32[R]: processed, then greedy or random as each row asks."""
    branch = functools.partial(_branch, features, metadata)
    logits = branch(PROCESSOR_FEATURES, lambda x: process_logits(x, metadata, state), lambda x: x, logits)
    chunked = chunk_logits(logits)
    greedy = chunked.argmax
    whole = Feature.RANDOM | Feature.TOP_P | Feature.LARGE_TOP_K

    def from_top() -> jax.Array:
        return jnp.where(metadata.rows_with(Feature.TOP_K), draw_from_top(chunked, metadata, bits), greedy)

    def from_all() -> jax.Array:
        return jnp.where(metadata.rows_with(whole), draw_from_all(chunked, metadata, bits, branch), token_ids)

    token_ids = branch(Feature.TOP_K, from_top, lambda: greedy)
    token_ids = branch(whole, from_all, lambda: token_ids)
    return jnp.where(greedy < 0, -1, token_ids)

"""Log probabilities of chosen and of most likely tokens, from the raw logits: before any processing."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.sampling.fixed_point import chunk_limbs, exp_shifted, limbs_total
from jaxserve.sampling.top_tokens import chunk_logits, top_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogprobArrays:
    """N positions, K most likely tokens each. All zeros when no row of the step asked for logprobs."""

    token_logprobs: jax.Array
    """float32[N]: of the chosen (or prompt) token."""
    token_ranks: jax.Array
    """int32[N]: 1 + the number of tokens that are more likely than it."""
    top_ids: jax.Array
    """int32[N, K], most likely first; equal ones by id."""
    top_logprobs: jax.Array
    """float32[N, K]."""


def compute_logprobs(logits: jax.Array, token_ids: jax.Array, num_top: int) -> LogprobArrays:
    """log_softmax of each row at its token and at its ``num_top`` most likely tokens.

    Rows are independent, bit for bit, of N and of each other. NaN logits count as -inf. It serves
    prompt logprobs (``token_ids`` the next prompt tokens) and, through ``sample``, sampled ones.

    Args:
        logits: float32[N, V].
        token_ids: int32[N] in [0, V); others are clipped.
        num_top: static, in [0, V].
    """
    chunked = chunk_logits(logits)
    maximum = chunked.maximum
    total = limbs_total(*chunk_limbs(exp_shifted(chunked.chunks, maximum)))
    log_total = jnp.log(jnp.maximum(total, 1.0))

    def logprob(chosen: jax.Array) -> jax.Array:
        shifted = jnp.where(chosen == maximum[:, None], 0.0, chosen - maximum[:, None])
        return shifted - log_total[:, None]

    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1, mode="clip")
    top, top_ids = top_tokens(chunked, num_top)
    return LogprobArrays(
        token_logprobs=logprob(chosen)[:, 0],
        token_ranks=1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=logprob(top),
    )


def no_logprobs(num_rows: int, num_top: int) -> LogprobArrays:
    """Zeros in the shapes of ``compute_logprobs``."""
    return LogprobArrays(
        token_logprobs=jnp.zeros(num_rows, jnp.float32),
        token_ranks=jnp.zeros(num_rows, jnp.int32),
        top_ids=jnp.zeros((num_rows, num_top), jnp.int32),
        top_logprobs=jnp.zeros((num_rows, num_top), jnp.float32),
    )

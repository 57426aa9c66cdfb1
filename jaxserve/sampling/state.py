"""SamplerState: what sampling remembers on the device between steps, addressed by persistent request row.

It is allocated once, donated to every step, and changed only by ``sample`` and by the functions here. All of
them have fixed shapes: the runner compiles each once, before it serves. Out-of-range rows and ids are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxserve.sampling.token_mask import mask_words as mask_words
from jaxserve.sampling_params import MAX_LOGIT_BIAS

HISTORY_CHUNK = 1024
"""Token ids that one ``add_history`` call takes."""
MASK_ROWS = (8, 64)
"""Rows that ``set_mask_rows`` takes: one program each."""
MAX_COUNT = 0x7FFF
"""Occurrences are counted up to this many."""
PROMPT_BIT = 0x8000
"""Bit of a history entry: the token occurs in the prompt. The lower 15 bits count it in the output."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """S is ``max_num_seqs``, V the vocabulary size, W = ceil(V / 32).

    A row's history, mask and bias are read only while its request's metadata says so; they may hold
    anything else before (``reset_row``, ``set_mask_rows`` and ``set_bias_row`` start them).
    """

    last_token_ids: jax.Array
    """int32[S + 1]: the token each row sampled last. The last entry serves padding rows and stays 0."""
    history: jax.Array
    """uint16[S, V]: occurrences in the output (15 bits, saturating) and ``PROMPT_BIT``."""
    token_mask: jax.Array
    """int32[S, W]: bit v % 32 of word v // 32 is 1 where token v is allowed."""
    bias_ids: jax.Array
    bias_values: jax.Array
    """int32 and float32 [S, MAX_LOGIT_BIAS]: logit_bias entries, of which the first ``num_bias`` count."""

    @classmethod
    def create(cls, max_num_seqs: int, vocab_size: int) -> SamplerState:
        """A state of zeros."""
        shapes = state_shapes(max_num_seqs, vocab_size)
        return cls(**{name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()})

    @property
    def max_num_seqs(self) -> int:
        return self.history.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.history.shape[1]


def state_shapes(max_num_seqs: int, vocab_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each leaf of ``SamplerState``, by name."""
    return {
        "last_token_ids": jax.ShapeDtypeStruct((max_num_seqs + 1,), jnp.int32),
        "history": jax.ShapeDtypeStruct((max_num_seqs, vocab_size), jnp.uint16),
        "token_mask": jax.ShapeDtypeStruct((max_num_seqs, mask_words(vocab_size)), jnp.int32),
        "bias_ids": jax.ShapeDtypeStruct((max_num_seqs, MAX_LOGIT_BIAS), jnp.int32),
        "bias_values": jax.ShapeDtypeStruct((max_num_seqs, MAX_LOGIT_BIAS), jnp.float32),
    }


def state_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Device bytes of the state: 86 MB for 256 x 151,936, 288 MB for 1,024 x 128,256."""
    shapes = state_shapes(max_num_seqs, vocab_size)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in shapes.values())


def _drop_negative(indices: jax.Array, size: int) -> jax.Array:
    # JAX wraps negative indices around before mode="drop" looks at them.
    return jnp.where(indices < 0, size, indices)


def reset_row(state: SamplerState, row: jax.Array) -> SamplerState:
    """Forget a row's history: before ``add_history``, when a request with penalties enters. ``row``: int32[]."""
    row = _drop_negative(row, state.max_num_seqs)
    return replace(state, history=state.history.at[row].set(0, mode="drop"))


def add_history(
    state: SamplerState, row: jax.Array, token_ids: jax.Array, is_output: jax.Array
) -> SamplerState:
    """Add prompt or output tokens to a row's history, for penalties.

    Args:
        row: int32[].
        token_ids: int32[HISTORY_CHUNK], padded with -1.
        is_output: bool[] or int32[]: count them as output, or mark them as prompt.
    """
    ids = _drop_negative(token_ids, state.vocab_size)
    row = _drop_negative(row, state.max_num_seqs)
    added = jnp.zeros(state.vocab_size, jnp.int32).at[ids].add(1, mode="drop")
    old = state.history.at[row].get(mode="clip").astype(jnp.int32)
    counted = jnp.minimum((old & MAX_COUNT) + added, MAX_COUNT) | (old & PROMPT_BIT)
    marked = old | jnp.where(added > 0, PROMPT_BIT, 0)
    new = jnp.where(is_output != 0, counted, marked).astype(jnp.uint16)
    return replace(state, history=state.history.at[row].set(new, mode="drop"))


def set_mask_rows(state: SamplerState, rows: jax.Array, bits: jax.Array) -> SamplerState:
    """Replace token masks.

    Args:
        rows: int32[n], padded with ``max_num_seqs``; n is one of MASK_ROWS.
        bits: int32[n, W].
    """
    rows = _drop_negative(rows, state.max_num_seqs)
    return replace(state, token_mask=state.token_mask.at[rows].set(bits, mode="drop"))


def set_bias_row(state: SamplerState, row: jax.Array, ids: jax.Array, values: jax.Array) -> SamplerState:
    """Replace a row's bias table.

    Args:
        row: int32[].
        ids: int32[MAX_LOGIT_BIAS], token ids, no two equal; padded with anything.
        values: float32[MAX_LOGIT_BIAS].
    """
    row = _drop_negative(row, state.max_num_seqs)
    return replace(
        state,
        bias_ids=state.bias_ids.at[row].set(ids, mode="drop"),
        bias_values=state.bias_values.at[row].set(values, mode="drop"),
    )


def record_tokens(
    state: SamplerState, row_ids: jax.Array, token_ids: jax.Array, *, count: bool
) -> SamplerState:
    """Remember a step's sampled tokens; padding rows are dropped.

    Args:
        row_ids, token_ids: int32[R]; real row ids are unique.
        count: static: also count them in ``history`` (penalties may be in use).
    """
    # last_token_ids has one entry more than there are rows: padding rows must miss that one too.
    rows = jnp.where(row_ids >= state.max_num_seqs, state.max_num_seqs + 1, row_ids)
    state = replace(state, last_token_ids=state.last_token_ids.at[rows].set(token_ids, mode="drop"))
    if not count:
        return state
    old = state.history.at[rows, token_ids].get(mode="clip").astype(jnp.int32)
    new = jnp.minimum((old & MAX_COUNT) + 1, MAX_COUNT) | (old & PROMPT_BIT)
    return replace(state, history=state.history.at[rows, token_ids].set(new.astype(jnp.uint16), mode="drop"))

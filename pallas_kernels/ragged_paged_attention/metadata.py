"""AttentionMetadata: what every layer's attention needs to know of a step's ragged, padded batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "seq_lens",
        "block_tables",
        "query_start_loc",
        "distribution",
        "slot_mapping",
        "positions",
        "row_ids",
    ],
    meta_fields=["decode_only"],
)
@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch, rows ordered decode first. All int32.

    T tokens and R rows are padded sizes; B is the widest block table.

    Args:
        seq_lens: [R] tokens of the row after this step (cached + new); 0 for a padding row.
        block_tables: [R, B] physical block of each logical block; 0 (the dummy block) where there is none.
        query_start_loc: [R + 1] where each row's tokens begin in T; padding rows repeat the number of live tokens.
        distribution: [3] row counts (decode, decode + short, all live): rows before the first have exactly one
            query token, rows before the second a few (verification of drafts), rows before the third any number;
            rows after it are padding.
        slot_mapping: [T] flat cache slot (block * block_size + offset) each new token is written to; out of range
            (num_blocks * block_size or more) for padding tokens, whose write is dropped.
        positions: [T] position of each token in its row; 0 for padding tokens.
        row_ids: [T] row of each token; R - 1 for padding tokens.
        decode_only: static: every live row has exactly one query, so that T == R and a backend may leave out what
            serves longer rows.
    """

    seq_lens: jax.Array
    block_tables: jax.Array
    query_start_loc: jax.Array
    distribution: jax.Array
    slot_mapping: jax.Array
    positions: jax.Array
    row_ids: jax.Array
    decode_only: bool = False

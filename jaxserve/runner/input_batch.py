"""InputBatch: the runner's persistent rows. A request keeps its row from admission until it ends or is preempted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxserve.runner.buckets import Bucket
from jaxserve.runner.step_layout import StepLayout
from jaxserve.sampling.metadata import make_table, set_masked, write_row
from jaxserve.sampling.token_mask import TokenMaskBuilder
from jaxserve.step import CachedRequestData, NewRequestData


@dataclass
class TablePatches:
    """Block table entries that the device does not have yet."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def add(self, row: int, column: int, blocks: list[int]) -> None:
        """Entries ``column``, ``column + 1``, … of ``row``."""
        self.rows += [row] * len(blocks)
        self.columns += range(column, column + len(blocks))
        self.blocks += blocks

    def take(self) -> TablePatches:
        """All entries so far; starts afresh."""
        taken = TablePatches(self.rows, self.columns, self.blocks)
        self.rows, self.columns, self.blocks = [], [], []
        return taken


@dataclass
class RowState:
    """What the host remembers of one request in the batch."""

    request: NewRequestData
    row: int
    num_blocks: int
    token_ids: np.ndarray
    """[n] int32: all tokens known when the request entered; what it samples later stays on the device."""
    mask: TokenMaskBuilder | None
    output_token_ids: list[int]
    """Output tokens the host has read: kept for requests whose mask depends on them."""


@dataclass(slots=True)
class DecodeStep:
    """The last step, if it only decoded: the next one may be the same but for its positions.

    ``num_tokens_of`` holds each row's tokens, ``scheduled`` in an array; ``asked`` is whether a program for decoding
    rows alone runs it, whether it is a burst, and the bucket if one was given. ``buffer`` is what was sent: not to be
    changed.
    """

    request_ids: list[str]
    num_tokens_of: list[int]
    asked: tuple[bool, bool, Bucket | None]
    layout: StepLayout
    scheduled: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    bucket: Bucket
    buffer: np.ndarray
    features: int
    has_patches: bool


class InputBatch:
    """Rows 0 … S - 1 and the requests in them; S is ``max_num_seqs``."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.states: dict[str, RowState] = {}
        self.row_of: dict[str, int] = {}
        self.num_computed_tokens = np.zeros(max_num_seqs + 1, np.int32)
        self.num_known_tokens = np.zeros(max_num_seqs + 1, np.int32)
        self.sampling = make_table(max_num_seqs)
        self.patches = TablePatches()
        self.masked: dict[str, RowState] = {}
        self.scoring_prompt: set[str] = set()
        """Requests whose prompts are not wholly scored."""
        self.last_decode: DecodeStep | None = None
        """Kept by the batch builder; forgotten as soon as anything changes but block tables."""

    def add(self, request: NewRequestData) -> RowState:
        """Give a request a row; its whole block table becomes patches."""
        self.last_decode = None
        row = self.free_rows.pop()
        params = request.sampling_params
        token_ids = np.asarray(request.token_ids, np.int32)
        mask = TokenMaskBuilder.create(
            params, self.vocab_size, request.stop_token_ids, request.bad_words_token_ids
        )
        (blocks,) = request.block_ids
        outputs = request.token_ids[request.num_prompt_tokens :]
        state = RowState(request, row, len(blocks), token_ids, mask, outputs)
        self.states[request.request_id] = state
        self.row_of[request.request_id] = row
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.num_known_tokens[row] = len(token_ids)
        write_row(self.sampling, row, params, request.seed)
        if mask is not None:
            self.masked[request.request_id] = state
            self.set_masked(row, False)
        if params.prompt_logprobs is not None:
            self.scoring_prompt.add(request.request_id)
        self.patches.add(row, 0, blocks)
        return state

    def extend(self, request: CachedRequestData) -> None:
        """Append new blocks to a request's table."""
        state = self.states[request.request_id]
        (blocks,) = request.new_block_ids
        self.patches.add(state.row, state.num_blocks, blocks)
        state.num_blocks += len(blocks)

    def append(self, request_id: str, token_ids: list[int]) -> RowState:
        """Learn the tokens of a row from ``num_computed_tokens`` on; those before are computed and not read again."""
        self.last_decode = None
        state = self.states[request_id]
        computed = int(self.num_computed_tokens[state.row])
        known = np.zeros(computed + len(token_ids), np.int32)
        old = state.token_ids[:computed]
        known[: len(old)] = old
        known[computed:] = token_ids
        state.token_ids = known
        self.num_known_tokens[state.row] = len(known)
        return state

    def set_masked(self, row: int, masked: bool) -> None:
        """Say whether a row's token mask is in force, from the next step on."""
        self.last_decode = None
        set_masked(self.sampling, row, masked)

    def remove(self, request_id: str) -> None:
        """Free a request's row; unknown ids (never scheduled) are ignored."""
        state = self.states.pop(request_id, None)
        if state is None:
            return
        self.last_decode = None
        del self.row_of[request_id]
        self.masked.pop(request_id, None)
        self.scoring_prompt.discard(request_id)
        self.free_rows.append(state.row)

"""StateUpdates: what the host changes of the device's state between steps, by small programs of fixed shapes.

Most steps change nothing that does not travel in their own buffer. Here is the rest: long block tables, histories and
biases of requests that have any, token masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.runner.input_batch import RowState, TablePatches
from jaxserve.runner.placement import Placement
from jaxserve.runner.step_program import PATCH_CHUNK, DeviceState
from jaxserve.sampling.state import HISTORY_CHUNK, MASK_ROWS, MAX_LOGIT_BIAS, mask_words


class StateUpdates:
    """Each method takes the state, which is donated, and returns what replaces it. Rows are a rank's.

    Args:
        placement: where the state lies.
        compiled: the programs, of ``StepPrograms``.
        max_num_seqs: S; as a row, one that does not exist.
        vocab_size: V.
    """

    def __init__(
        self, placement: Placement, compiled: Mapping[Any, Any], max_num_seqs: int, vocab_size: int
    ) -> None:
        self._placement, self._compiled = placement, compiled
        self._max_num_seqs, self._vocab_size = max_num_seqs, vocab_size

    def warm_up(self, state: DeviceState) -> DeviceState:
        """Run every program once, on no row at all."""
        row, one = np.full(1, self._max_num_seqs, np.int32), np.zeros(1, np.int32)
        state = self.patch(state, 0, TablePatches([self._max_num_seqs], [0], [0]))
        state = self._change(state, "reset_row", 0, row)
        state = self._change(state, "add_history", 0, row, np.full(HISTORY_CHUNK, -1, np.int32), one)
        for size in MASK_ROWS:
            state = self._set_masks(state, 0, [], size)
        bias = np.zeros(MAX_LOGIT_BIAS, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
        return self._change(state, "set_bias_row", 0, row, *bias)

    def patch(self, state: DeviceState, rank: int, patches: TablePatches) -> DeviceState:
        """Send block table entries that do not fit into a step's buffer."""
        for start in range(0, len(patches.rows), PATCH_CHUNK):
            rows = np.full(PATCH_CHUNK, self._max_num_seqs, np.int32)
            columns, blocks = np.zeros((2, PATCH_CHUNK), np.int32)
            part = slice(start, start + PATCH_CHUNK)
            num = len(patches.rows[part])
            rows[:num], columns[:num] = patches.rows[part], patches.columns[part]
            blocks[:num] = patches.blocks[part]
            put = self._placement.put_for
            arrays = put(rank, rows, self._max_num_seqs), put(rank, columns), put(rank, blocks)
            state = self._compiled["patch"](state, *arrays)
        return state

    def prepare_row(self, state: DeviceState, rank: int, row: RowState) -> DeviceState:
        """Bring a new row's history and bias to the device; most requests have neither."""
        request, index = row.request, np.full(1, row.row, np.int32)
        params = request.sampling_params
        if params.needs_penalties:
            state = self._change(state, "reset_row", rank, index)
            split = request.num_prompt_tokens
            state = self.add_history(state, rank, row.row, row.token_ids[:split], is_output=0)
            state = self.add_history(state, rank, row.row, row.token_ids[split:], is_output=1)
        if params.logit_bias:
            ids, values = np.zeros(MAX_LOGIT_BIAS, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
            ids[: len(params.logit_bias)] = list(params.logit_bias)
            values[: len(params.logit_bias)] = list(params.logit_bias.values())
            state = self._change(state, "set_bias_row", rank, index, ids, values)
        return state

    def add_history(
        self, state: DeviceState, rank: int, row: int, token_ids: np.ndarray, is_output: int
    ) -> DeviceState:
        """Count tokens, of the prompt or of the output, for a row's penalties."""
        which, kind = np.full(1, row, np.int32), np.full(1, is_output, np.int32)
        for start in range(0, len(token_ids), HISTORY_CHUNK):
            chunk = np.full(HISTORY_CHUNK, -1, np.int32)
            part = token_ids[start : start + HISTORY_CHUNK]
            chunk[: len(part)] = part
            state = self._change(state, "add_history", rank, which, chunk, kind)
        return state

    def set_masks(self, state: DeviceState, rank: int, masks: list[tuple[int, np.ndarray]]) -> DeviceState:
        """Send token masks, each with its row; as few programs as will do."""
        most = MASK_ROWS[-1]
        for start in range(0, len(masks), most):
            part = masks[start : start + most]
            state = self._set_masks(state, rank, part, next(size for size in MASK_ROWS if size >= len(part)))
        return state

    def _set_masks(
        self, state: DeviceState, rank: int, masks: list[tuple[int, np.ndarray]], size: int
    ) -> DeviceState:
        rows = np.full(size, self._max_num_seqs, np.int32)
        bits = np.zeros((size, mask_words(self._vocab_size)), np.int32)
        for index, (row, words) in enumerate(masks):
            rows[index], bits[index] = row, words
        return self._change(state, ("set_mask_rows", size), rank, rows, bits)

    def _change(
        self, state: DeviceState, name: str | tuple[str, int], rank: int, rows: np.ndarray, *args: np.ndarray
    ) -> DeviceState:
        """Change a rank's rows of the sampler's state; the other ranks are told of a row that does not exist."""
        put = self._placement.put_for
        arrays = put(rank, rows, self._max_num_seqs), *(put(rank, value) for value in args)
        return replace(state, sampler=self._compiled[name](state.sampler, *arrays))

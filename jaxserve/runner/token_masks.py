"""changed_masks: which rows of a step need another token mask on the device than they have there."""

from __future__ import annotations

import numpy as np

from jaxserve.runner.input_batch import InputBatch, RowState
from jaxserve.step import SchedulerOutput


def changed_masks(
    batch: InputBatch, step: SchedulerOutput, exhausted: set[str]
) -> list[tuple[int, np.ndarray]]:
    """The masks to send before a step, and notes in the batch which rows are masked.

    Args:
        batch: one rank's rows; ``num_computed_tokens`` are those before the step.
        step: the step; its ``token_masks`` may still be being worked out, and are waited for.
        exhausted: gets the requests that are left no token.

    Returns:
        (row, mask as int32[ceil(V / 32)]) of the rank's rows.
    """
    changed: list[tuple[int, np.ndarray]] = []
    for request_id, state in batch.masked.items():
        if request_id not in step.samples or request_id in step.token_masks or state.mask is None:
            continue
        num_output_tokens = _num_output_tokens(batch, state, step)
        if not state.mask.needs_update(num_output_tokens, state.output_token_ids):
            continue
        bits = state.mask.bits(num_output_tokens, state.output_token_ids)
        batch.set_masked(state.row, bits is not None)
        if bits is not None:
            changed.append((state.row, bits))
    for request_id, mask in step.token_masks.items():
        state = batch.states.get(request_id)
        if state is None:
            continue  # another rank's
        words = mask.words()
        if state.mask is not None:
            words = state.mask.bits(_num_output_tokens(batch, state, step), state.output_token_ids, words)
        if not words.any():
            exhausted.add(request_id)
        batch.set_masked(state.row, True)
        changed.append((state.row, words))
    return changed


def _num_output_tokens(batch: InputBatch, state: RowState, step: SchedulerOutput) -> int:
    """Output tokens of a row before the one that this step samples."""
    scheduled = step.num_scheduled_tokens[state.request.request_id]
    return int(batch.num_computed_tokens[state.row]) + scheduled - state.request.num_prompt_tokens

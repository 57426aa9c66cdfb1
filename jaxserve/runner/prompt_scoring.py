"""PromptScorer: log probabilities of prompt tokens, from the hidden states that a step left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.runner.batch_builder import StepBatch
from jaxserve.runner.input_batch import InputBatch
from jaxserve.runner.pending_step import ScoredPrompt
from jaxserve.runner.placement import Placement
from jaxserve.runner.step_program import SCORE_CHUNK


class PromptScorer:
    """Scores a few positions at a time, by one program whatever the step's shape.

    Args:
        placement: where hidden states lie.
        compiled: the programs, of ``StepPrograms``.
        params: the model's weights.
    """

    def __init__(self, placement: Placement, compiled: Mapping[Any, Any], params: Any) -> None:
        self._placement, self._compiled, self._params = placement, compiled, params

    def warm_up(self, hidden: jax.Array) -> Any:
        """Run the programs for hidden states of this shape once; what to wait for."""
        return self._score(0, hidden, 0, np.zeros(0, np.int32))

    def score(
        self, batches: Sequence[InputBatch], steps: Sequence[StepBatch], hidden: jax.Array
    ) -> list[ScoredPrompt]:
        """Score the prompt tokens that follow each position computed in a step.

        Args:
            batches, steps: of each rank; the batches count the step's tokens as computed.
            hidden: [T, M] of all ranks, rank after rank.
        """
        return [
            self._score_prompt(rank, batch, step, index, hidden)
            for rank, (batch, step) in enumerate(zip(batches, steps, strict=True))
            for index, request_id in enumerate(step.request_ids)
            if request_id in batch.scoring_prompt
        ]

    def _score_prompt(
        self, rank: int, batch: InputBatch, step: StepBatch, index: int, hidden: jax.Array
    ) -> ScoredPrompt:
        request_id = step.request_ids[index]
        state = batch.states[request_id]
        start, stop = int(step.starts[index]), int(step.starts[index + 1])
        first = int(batch.num_computed_tokens[state.row]) - (stop - start)
        num_prompt_tokens = state.request.num_prompt_tokens
        targets = state.token_ids[:num_prompt_tokens][first + 1 : first + 1 + stop - start]
        chunks = [
            self._score(rank, hidden, start + offset, targets[offset : offset + SCORE_CHUNK])
            for offset in range(0, len(targets), SCORE_CHUNK)
        ]
        num_top = state.request.sampling_params.prompt_logprobs
        assert num_top is not None
        if first + stop - start >= num_prompt_tokens - 1:
            batch.scoring_prompt.discard(request_id)  # the prompt is scored; its later steps are like any
        return ScoredPrompt(request_id, targets, num_top, chunks, rank * SCORE_CHUNK)

    def _score(self, rank: int, hidden: jax.Array, start: int, targets: np.ndarray) -> Any:
        padded = np.zeros(SCORE_CHUNK, np.int32)
        padded[: len(targets)] = targets
        num_tokens = len(hidden) // self._placement.num_ranks
        put = self._placement.put_for
        states = self._compiled["slice_hidden", num_tokens](hidden, put(rank, np.full(1, start, np.int32)))
        return self._compiled["score"](self._params, states, put(rank, padded))

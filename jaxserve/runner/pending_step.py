"""DispatchedStep: a step on its way. Its arrays are copied to the host in the background and read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxserve.runner.step_program import SCORE_CHUNK
from jaxserve.sampling.logprobs import LogprobArrays
from jaxserve.sampling.sampler import SamplerOutput
from jaxserve.step import ModelRunnerOutput, TokenLogprobs

NO_FINITE_LOGITS = "The model gave no finite logits for this request: the checkpoint may be broken."


@dataclass
class ScoredPrompt:
    """Prompt positions of one request being scored: ``num_positions`` of them, SCORE_CHUNK a chunk."""

    request_id: str
    token_ids: np.ndarray
    num_top: int
    chunks: list[LogprobArrays]
    first_row: int = 0
    """Of each chunk: those before are other ranks'."""


@dataclass(slots=True)
class DispatchedStep:
    """What to read back, and for whom.

    Args:
        step_id: the scheduler's.
        sampled: device arrays of the step.
        sampling_rows: (batch row, request id) of every request that samples in this step.
        num_logprobs: request id -> most likely tokens wanted (-1: the whole vocabulary).
        prompts: prompts scored in this step.
        on_tokens: called with the sampled tokens per request when they are read.
        exhausted: requests whose masks allow no token.
        num_padded_tokens: tokens of the step's shape, over all ranks.
        num_burst_tokens: of a burst, the tokens of each of its rows; its ``sampled`` holds step after step.
    """

    step_id: int
    sampled: SamplerOutput
    sampling_rows: list[tuple[int, str]]
    num_logprobs: dict[str, int]
    prompts: list[ScoredPrompt]
    on_tokens: Callable[[dict[str, list[int]]], None]
    exhausted: set[str] = field(default_factory=set)
    num_padded_tokens: int = 0
    num_burst_tokens: Mapping[str, int] | None = None
    _output: ModelRunnerOutput | None = field(default=None, init=False)

    def start_copies(self) -> None:
        """Begin the copies to the host, so that ``result`` finds them done."""
        self.sampled.token_ids.copy_to_host_async()
        for imbalance in self.sampled.expert_imbalance:
            imbalance.copy_to_host_async()
        if self.num_logprobs:
            jax.tree.map(lambda array: array.copy_to_host_async(), self.sampled.logprobs)

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and read it."""
        if self._output is None:
            self._output = self._read()
        return self._output

    def _read(self) -> ModelRunnerOutput:
        output = ModelRunnerOutput(
            self.step_id, exhausted=self.exhausted, num_padded_tokens=self.num_padded_tokens
        )
        if self.num_burst_tokens is not None:
            self._read_burst(output, self.num_burst_tokens)
        elif self.sampling_rows:
            self._read_tokens(output, np.asarray(self.sampled.token_ids).tolist())
        else:
            self.sampled.token_ids.block_until_ready()
        for imbalance in self.sampled.expert_imbalance:
            output.expert_imbalance = float(np.asarray(imbalance)[0])
        if self.num_logprobs:
            host = jax.tree.map(np.asarray, self.sampled.logprobs)
            for row, request_id in self.sampling_rows:
                num_top = self.num_logprobs.get(request_id)
                if num_top is not None and request_id in output.sampled_token_ids:
                    (token_id,) = output.sampled_token_ids[request_id]
                    output.logprobs[request_id] = [token_logprobs(host, row, token_id, num_top)]
        for prompt in self.prompts:
            output.prompt_logprobs[prompt.request_id] = _read_prompt(prompt)
        self.on_tokens(output.sampled_token_ids)
        return output

    def _read_tokens(self, output: ModelRunnerOutput, token_ids: list[int]) -> None:
        if min(token_ids) >= 0 and not self.exhausted:
            output.sampled_token_ids = {
                request_id: [token_ids[row]] for row, request_id in self.sampling_rows
            }
            return
        for row, request_id in self.sampling_rows:
            if request_id in self.exhausted:
                continue
            if (token_id := token_ids[row]) < 0:
                output.failed[request_id] = NO_FINITE_LOGITS
            else:
                output.sampled_token_ids[request_id] = [token_id]

    def _read_burst(self, output: ModelRunnerOutput, num_tokens: Mapping[str, int]) -> None:
        steps = np.asarray(self.sampled.token_ids).reshape(max(num_tokens.values()), -1)
        for row, request_id in self.sampling_rows:
            token_ids = steps[: num_tokens[request_id], row].tolist()
            if min(token_ids) < 0:
                output.failed[request_id] = NO_FINITE_LOGITS
            else:
                output.sampled_token_ids[request_id] = token_ids


def token_logprobs(arrays: LogprobArrays, row: int, token_id: int, num_top: int) -> TokenLogprobs:
    """One position: the chosen token first, then the ``num_top`` most likely (-1: all)."""
    stop = arrays.top_ids.shape[1] if num_top < 0 else num_top
    return TokenLogprobs(
        [token_id, *arrays.top_ids[row, :stop].tolist()],
        [float(arrays.token_logprobs[row]), *arrays.top_logprobs[row, :stop].tolist()],
        int(arrays.token_ranks[row]),
    )


def _read_prompt(prompt: ScoredPrompt) -> list[TokenLogprobs]:
    scored: list[TokenLogprobs] = []
    for index, chunk in enumerate(prompt.chunks):
        host = jax.tree.map(np.asarray, chunk)
        tokens = prompt.token_ids[index * SCORE_CHUNK : (index + 1) * SCORE_CHUNK].tolist()
        rows = range(prompt.first_row, prompt.first_row + len(tokens))
        scored += [token_logprobs(host, row, token, prompt.num_top) for row, token in zip(rows, tokens)]
    return scored

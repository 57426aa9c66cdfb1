"""BeamSearch: the most likely outputs of one prompt, found as transformers' ``generate(num_beams=…)`` finds them.

The search knows no engine: ``prompts`` says which sequences to score, ``advance`` takes the most likely next
tokens of each. Whoever drives it asks the engine for one token with log probabilities a beam and step; the prefix
cache makes that one computed token (and a part of a block) each.

Central idea: of all continuations of the running beams the (1 + number of end tokens) x width best are looked at, so
that width of them go on even if the others all end. One that ends counts only if it is among the width best. Scores
of ended ones are log probabilities over length ** length_penalty; the search ends when no running beam can beat the
worst of width ended ones (judged, as transformers does, by its present length).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.errors import InvalidRequestError, RequestFailedError
from jaxserve.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxserve.tokenizer.interface import Tokenizer


@dataclass(frozen=True)
class Beam:
    """One sequence.

    Args:
        token_ids: its output tokens.
        score: float32; of a running one the sum of log probabilities, of an ended one that over the penalised length.
        cumulative_logprob: the sum of log probabilities.
        logprobs: one entry a token.
        finish_reason: stop or length; None while it runs.
    """

    token_ids: list[int] = field(default_factory=list[int])
    score: np.float32 = np.float32(0.0)
    cumulative_logprob: float = 0.0
    logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    finish_reason: str | None = None


class BeamSearch:
    """One prompt's search.

    Args:
        prompt_token_ids: at least one token.
        params: width, limits and penalty.
        eos_token_ids: ids that end a sequence.
        max_model_len: longest prompt plus output, in tokens.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        eos_token_ids: Collection[int],
        max_model_len: int,
    ) -> None:
        self.prompt_token_ids = list(prompt_token_ids)
        self._width = params.beam_width
        self._penalty = params.length_penalty
        self._ends = frozenset(() if params.ignore_eos else eos_token_ids)
        self._max_tokens = min(params.max_tokens, max_model_len - len(self.prompt_token_ids))
        self._running = [Beam()]
        self._ended: list[Beam] = []
        """Best first, ``beam_width`` at most."""
        self.finished = False

    @staticmethod
    def candidates(params: BeamSearchParams, num_eos_tokens: int) -> int:
        """The most likely next tokens that ``advance`` needs of each beam."""
        num_ends = 0 if params.ignore_eos else num_eos_tokens
        return max(2, 1 + num_ends) * params.beam_width

    def prompts(self) -> list[list[int]]:
        """The sequences to score next, prompt included."""
        return [self.prompt_token_ids + beam.token_ids for beam in self._running]

    def advance(self, next_logprobs: Sequence[PositionLogprobs]) -> None:
        """Take the most likely next tokens of each of ``prompts``; sets ``finished`` at the end."""
        keep = max(2, 1 + len(self._ends)) * self._width
        candidates = self._extend(next_logprobs, keep)
        length = len(candidates[0].token_ids)
        open_beams = [beam for beam in candidates if beam.finish_reason is None]
        # Only the best may end here; the rest of the candidates stand in for them.
        ended = [beam for beam in candidates[: self._width] if beam.finish_reason is not None]
        scale = float(length) ** self._penalty
        self._ended += [_with_score(beam, np.float32(beam.score / np.float32(scale))) for beam in ended]
        self._ended.sort(key=_descending)
        del self._ended[self._width :]
        self._running = open_beams[: self._width]
        self.finished = not self._running or not self._can_improve(scale)

    def _extend(self, next_logprobs: Sequence[PositionLogprobs], keep: int) -> list[Beam]:
        """The best ``keep`` continuations, best first."""
        found = [
            (np.float32(beam.score + np.float32(entry.logprob)), token_id, beam, position)
            for beam, position in zip(self._running, next_logprobs, strict=True)
            for token_id, entry in position.items()
        ]
        found.sort(key=lambda item: -float(item[0]))
        return [
            Beam(
                [*beam.token_ids, token_id],
                score,
                beam.cumulative_logprob + position[token_id].logprob,
                [*beam.logprobs, {token_id: position[token_id], **position}],
                self._finish_reason(token_id, len(beam.token_ids) + 1),
            )
            for score, token_id, beam, position in found[:keep]
        ]

    def _finish_reason(self, token_id: int, length: int) -> str | None:
        if token_id in self._ends:
            return "stop"
        return "length" if length >= self._max_tokens else None

    def _can_improve(self, scale: float) -> bool:
        if len(self._ended) < self._width:
            return True
        best = np.float32(self._running[0].score / np.float32(scale))
        return bool(best > self._ended[-1].score)

    def best(self) -> list[Beam]:
        """The best sequences that have ended, best first."""
        return self._ended


def step_params(params: BeamSearchParams, num_eos_tokens: int, max_logprobs: int) -> SamplingParams:
    """How the engine is asked for the next tokens of a beam.

    Raises:
        InvalidRequestError: the beams need more log probabilities than the engine gives.
    """
    needed = BeamSearch.candidates(params, num_eos_tokens)
    if 0 <= max_logprobs < needed:
        raise InvalidRequestError(
            f"A beam width of {params.beam_width} needs the {needed} most likely tokens of each position, but this "
            f"engine gives {max_logprobs}. Lower the width, or start it with --max-logprobs {needed}.",
            param="n",
        )
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprobs=needed,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def next_logprobs(output: RequestOutput) -> PositionLogprobs:
    """The most likely next tokens, from the answer to a request with ``step_params``.

    Raises:
        RequestFailedError: it ended without a token.
    """
    (choice,) = output.outputs
    if not choice.logprobs or choice.finish_reason in ("abort", "error"):
        raise RequestFailedError("A step of the beam search was aborted.")
    return choice.logprobs[0]


def completion_of(
    beam: Beam, index: int, params: BeamSearchParams, tokenizer: Tokenizer | None, num_logprobs: int | None
) -> CompletionOutput:
    """A beam as a choice of an answer.

    Args:
        num_logprobs: how many of the most likely tokens to list; None for no log probabilities.
    """
    shown = beam.token_ids
    if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
        shown = shown[:-1]
    text = ""
    if tokenizer is not None:
        text = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    logprobs = None
    if num_logprobs is not None:
        logprobs = [_fewer(position, num_logprobs) for position in beam.logprobs]
    return CompletionOutput(
        index, text, list(beam.token_ids), beam.cumulative_logprob, logprobs, beam.finish_reason
    )


def _fewer(position: PositionLogprobs, num_logprobs: int) -> PositionLogprobs:
    chosen = next(iter(position))
    return {
        token_id: entry
        for token_id, entry in position.items()
        if token_id == chosen or (entry.rank or 1) <= num_logprobs
    }


def _with_score(beam: Beam, score: np.float32) -> Beam:
    return Beam(beam.token_ids, score, beam.cumulative_logprob, beam.logprobs, beam.finish_reason)


def _descending(beam: Beam) -> float:
    return -float(beam.score)

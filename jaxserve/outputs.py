"""What a user gets back: RequestOutput, one CompletionOutput per choice, and Logprob."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log probability of one token at one position.

    ``rank`` is 1 for the most likely token of the vocabulary; ``decoded_token`` its text (None without a tokenizer).
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id to Logprob at one position; the sampled (or prompt) token comes first."""


@dataclass
class RequestMetrics:
    """Times of one request, in seconds of ``time.monotonic()``."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    detokenize_seconds: float = 0.0
    """Spent on making text of its tokens; measured while requests are traced."""


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    ``finish_reason``: stop | length | abort | error | repetition, None while it runs. ``stop_reason``: the stop string
    or stop token id that ended it; None for the end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The state of one request (with DELTA, what is new in it)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, repr=False)


@dataclass
class BeamSearchSequence:
    """One sequence that a beam search found. ``tokens`` and ``text`` hold prompt and output."""

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """What a beam search found for one prompt, best first."""

    sequences: list[BeamSearchSequence]

"""Request: one sequence as the scheduler sees it, from arrival to its end."""

from __future__ import annotations

import enum

from jaxserve.sampling_params import SamplingParams
from jaxserve.step import EngineCoreRequest, FinishReason
from jaxserve.structured_output.request_grammar import RequestGrammar


class RequestStatus(enum.Enum):
    WAITING_FOR_GRAMMAR = "waiting for grammar"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """One sequence.

    The central pair is ``num_computed_tokens`` chasing ``num_tokens`` (prompt + output).
    ``num_inflight_tokens`` counts tokens that a dispatched step will sample but that the host has not read
    yet: they count as tokens to compute (``num_tokens_with_inflight``), their ids live on the device.
    """

    __slots__ = (
        "all_token_ids", "arrival_time", "bad_words_token_ids", "block_hashes", "block_ids", "cache_salt",
        "data_rank", "detects_repetition", "draw", "eos_token_ids", "finish_reason", "first_scheduled_time", "grammar",
        "has_appended", "max_computed_tokens", "max_tokens",
        "needs_sync", "next_cache_at", "num_cached_tokens", "num_computed_tokens", "num_inflight_tokens",
        "num_preemptions", "num_prompt_tokens", "num_sent_logprobs", "num_slots", "order", "priority",
        "request_id", "sampling_params", "seed", "status", "stop_reason", "stop_token_ids",
    )  # fmt: skip

    def __init__(
        self, core_request: EngineCoreRequest, max_model_len: int, grammar: RequestGrammar | None = None
    ) -> None:
        params = core_request.sampling_params
        self.request_id: str = core_request.request_id
        self.sampling_params: SamplingParams = params
        self.arrival_time: float = core_request.arrival_time
        self.priority: int = core_request.priority
        self.cache_salt: str | None = core_request.cache_salt
        self.seed: int = core_request.seed
        self.bad_words_token_ids: list[list[int]] = core_request.bad_words_token_ids
        self.all_token_ids: list[int] = list(core_request.prompt_token_ids)
        self.num_prompt_tokens: int = len(core_request.prompt_token_ids)
        room = max_model_len - self.num_prompt_tokens
        self.max_tokens: int = room if params.max_tokens is None else min(params.max_tokens, room)
        self.max_computed_tokens: int = self.num_prompt_tokens + self.max_tokens - 1
        """The last token allowed is sampled, but never computed."""
        self.grammar: RequestGrammar | None = grammar
        """What constrains the output; the scheduler walks it."""
        self.has_appended: bool = False
        """Whether tokens were appended that were not sampled, and the runner has not been told."""
        long_bad_words = any(len(ids) > 1 for ids in core_request.bad_words_token_ids)
        self.needs_sync: bool = long_bad_words or grammar is not None
        """Whether the host must have read the last token before the next step."""
        self.detects_repetition: bool = params.repetition_detection is not None
        """Whether every token may be the last."""
        self.draw: int = 0
        """A ``scheduler.bursts.Draw``, set where there are bursts."""
        eos_token_ids = () if params.ignore_eos else core_request.eos_token_ids
        self.eos_token_ids: frozenset[int] = frozenset(eos_token_ids)
        self.stop_token_ids: frozenset[int] = self.eos_token_ids | frozenset(params.stop_token_ids or ())
        self.status: RequestStatus = (
            RequestStatus.WAITING if grammar is None else RequestStatus.WAITING_FOR_GRAMMAR
        )
        self.num_computed_tokens: int = 0
        self.num_inflight_tokens: int = 0
        self.num_cached_tokens: int = 0
        self.num_preemptions: int = 0
        self.num_sent_logprobs: int = 0
        """Prompt positions whose log probabilities were sent (position 0 has none)."""
        self.order: tuple[int, float, int] = (0, 0.0, 0)
        """Set by the scheduler; of two requests the one with the smaller order goes first."""
        self.data_rank: int = 0
        """The data parallel rank that it runs on, set whenever it starts; it may change by preemption."""
        self.first_scheduled_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.block_hashes: list[bytes] = []
        """Chained hashes of the full blocks of known tokens; this and the rest is kept by the KV cache
        manager."""
        self.block_ids: list[list[int]] = []
        """Block table of each KV cache group; empty while the request does not run."""
        self.num_slots: int = 0
        """Tokens that the blocks have room for."""
        self.next_cache_at: int = 0
        """When this many tokens are known, there may be another full block for the prefix cache."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known to the host."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_with_inflight(self) -> int:
        """Tokens to compute, counting those that are sampled but not read yet."""
        return len(self.all_token_ids) + self.num_inflight_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

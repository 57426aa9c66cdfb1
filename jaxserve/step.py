"""All that crosses between the scheduler (host) and the runner (device side) for one step, and the wire's
messages.

No JAX here: the scheduler, the engine core and the server are tested without it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from jaxserve.kv_cache_spec import KVCacheGroup
from jaxserve.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


# --- scheduler -> runner ------------------------------------------------------------------------------------


@dataclass(slots=True)
class NewRequestData:
    """A request that enters the runner's batch: new, or resumed after preemption (then its row starts
    afresh).

    ``token_ids`` are all tokens known to the host, prompt and output; ``num_prompt_tokens`` says where the
    output begins. ``block_ids`` holds one list per KV cache group. ``seed`` is always set: the user's or one
    drawn for it.

    ``data_rank`` is the data parallel rank of its row until it leaves the batch; block ids, here and in later
    steps, are blocks of that rank's cache.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: list[int]
    """Every id that ends this request (end-of-sequence ids unless ignored, then the user's)."""
    bad_words_token_ids: list[list[int]]
    block_ids: list[list[int]]
    num_computed_tokens: int
    data_rank: int = 0


@dataclass(slots=True)
class CachedRequestData:
    """A request already in the runner's batch that gets new blocks in this step. One that gets none is not
    listed.

    ``new_block_ids``: one list per KV cache group, to be appended to the row's block table (all groups'
    tables are equally long; block 0 stands where a group needs no block). ``num_computed_tokens``: tokens
    computed by earlier steps. The runner keeps that number itself: after a step it grows by the row's
    ``num_scheduled_tokens``.
    """

    request_id: str
    new_block_ids: list[list[int]]
    num_computed_tokens: int


class TokenMask(Protocol):
    """Which tokens one request may sample next; perhaps still being worked out."""

    def words(self) -> np.ndarray:
        """int32[ceil(V / 32)]: bit v % 32 of word v // 32 is 1 where token v is allowed. Waits for it."""
        ...


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work.

    ``num_scheduled_tokens`` is ordered: decoding rows (one token) first, then the rest, and this is the
    batch's row order. A request samples a token in this step when its scheduled tokens reach all its tokens
    (``samples``). ``finished_request_ids`` and ``preempted_request_ids`` leave the runner's batch before this
    step; an id may be among them and among ``new_requests`` too. Only requests of the runner's batch are
    named. A step without tokens holds nothing else either and need not be executed.

    The first ``num_decode_rows`` rows have one token and sample. A row's last token may be one that an
    earlier step sampled and the host has not read: the device has it.

    With ``RunnerInfo.separate_paths`` they are the rows that compute a generated token, whatever else is scheduled:
    prompt tokens are never among them, and of a row only one token is. Those in ``replayed_request_ids`` compute a
    token whose successor is known already (after preemption, or appended by a grammar) and do not sample.

    With data parallelism one step holds the rows of all ranks: the decoding rows rank by rank,
    ``num_decode_rows_by_rank`` of each (they add up to ``num_decode_rows``), then the rest rank by rank. The
    limits of a step (rows, tokens) hold for each rank by itself.

    A *burst* is ``num_decode_steps`` > 1 decode steps in one dispatch, each of which samples what the next one
    computes. All its rows decode, ``num_scheduled_tokens`` says in how many of its steps a row takes part, and the
    rows are in descending order of that. Within ``RunnerInfo.bursts`` only.

    ``appended_token_ids``: of rows that are in the batch already, the tokens from ``num_computed_tokens`` on, where
    the scheduler appended some that were not sampled. The first was; the runner knows nothing of the others.
    ``token_masks``: of the rows that sample, those that a grammar constrains.
    """

    step_id: int
    new_requests: list[NewRequestData] = field(default_factory=list)
    cached_requests: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    samples: set[str] = field(default_factory=set)
    finished_request_ids: list[str] = field(default_factory=list)
    preempted_request_ids: list[str] = field(default_factory=list)
    num_decode_rows: int = 0
    appended_token_ids: dict[str, list[int]] = field(default_factory=dict)
    token_masks: dict[str, TokenMask] = field(default_factory=dict)
    replayed_request_ids: set[str] = field(default_factory=set)
    num_decode_rows_by_rank: tuple[int, ...] = ()
    """One number per rank; empty in a step without tokens."""
    num_decode_steps: int = 1

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


# --- runner -> scheduler ------------------------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position: the chosen token first, then the most likely ones in order.

    ``rank`` is the chosen token's rank (1 = most likely); the others' ranks are 1, 2, 3, ….
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step produced, per request. ``failed`` names requests whose part of the step failed, with the
    reason. A burst brings each row as many tokens as it has steps."""

    step_id: int
    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt positions scored in this step, in order. Position 0 has no logprob and is not listed."""
    failed: dict[str, str] = field(default_factory=dict)
    exhausted: set[str] = field(default_factory=set)
    """Requests whose own restrictions left no token to sample; the step itself is fine."""
    num_padded_tokens: int = 0
    """Tokens of the shape that the step ran in, padding and all ranks included; 0 where there is none."""
    expert_imbalance: float = 0.0
    """Load of the most loaded expert (or device, under expert parallelism) over the mean; 0 without experts."""


class PendingStep(Protocol):
    """A step that was dispatched to the device. ``result`` waits for it and reads its tokens once."""

    def result(self) -> ModelRunnerOutput: ...


class ModelRunner(Protocol):
    """The device side as the engine core sees it."""

    def initialize(self) -> RunnerInfo:
        """Load weights, size and allocate the cache, compile every program of the bucket table."""
        ...

    def execute(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Dispatch one step without waiting for it. Steps run in the order of the calls."""
        ...

    def recover(self) -> None:
        """After a step failed: start again without requests, with an empty cache."""
        ...

    def num_compilations(self) -> int:
        """Compilations since ``initialize`` returned: 0 in a healthy engine."""
        ...

    def close(self) -> None:
        """Free device memory."""
        ...


@dataclass(frozen=True, slots=True)
class BurstLimits:
    """The bursts that a runner takes (``SchedulerOutput``). Their rows are greedy or draw in one of two ways: all those
    that draw have a top-k of at most ``max_top_k``, or all draw from the whole distribution. None needs more of the
    sampler than that."""

    num_steps: int
    """Decode steps of each; at most a block's tokens."""
    max_rows: int
    max_top_k: int


@dataclass(slots=True)
class RunnerInfo:
    """What the runner resolved while starting."""

    num_blocks: int
    """Blocks in each rank's pool, the rank's dummy block 0 included."""
    block_size: int
    max_model_len: int
    vocab_size: int
    kv_cache_groups: list[KVCacheGroup]
    kv_cache_bytes: int
    num_programs: int
    device: str
    data_parallel_size: int = 1
    """Ranks: each has its own rows, blocks and tokens of a step."""
    separate_paths: bool = False
    """A token's keys and values must not depend on the step that computes it, and the decoding rows' path gives other
    bits than the other rows': see ``SchedulerOutput``."""
    bursts: BurstLimits | None = None
    """None: a step is one step."""
    step_sizes: tuple[int, ...] = ()
    """Ascending: tokens that steps with prompts are padded to, as far as such a step takes as long as its padded size
    says."""


# --- server <-> engine core (msgpack) -----------------------------------------------------------------------


class EngineCoreRequest(msgspec.Struct, array_like=True):
    """One request as the engine core takes it: already tokenized and validated, n = 1.

    ``arrival_time`` is ``time.monotonic()`` of the front process on the same host. Lower ``priority`` runs
    first.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    seed: int
    eos_token_ids: list[int]
    bad_words_token_ids: list[list[int]]
    priority: int = 0
    cache_salt: str | None = None


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """What one step added to one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    error: str | None = None
    invalid_param: str | None = None
    """Set where ``error`` is the request's own mistake: the parameter at fault."""


class SchedulerStats(msgspec.Struct, array_like=True):
    """State of the scheduler after a step, over all data parallel ranks; counters run from the start of the
    engine."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of blocks in use, 0 to 1."""
    prefix_cache_queries: int = 0
    """Tokens looked up (counter)."""
    prefix_cache_hits: int = 0
    """Tokens found (counter)."""
    num_preemptions: int = 0
    num_compilations: int = 0
    step_tokens: int = 0
    """Tokens scheduled in this step."""
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_deferred: int = 0
    """Of those waiting, the requests that wait for something else than room: a grammar that is being compiled."""
    step_host_seconds: float = 0.0
    """What the host did in this step beside waiting for the device."""
    step_device_seconds: float = 0.0
    """From when the device could begin the step that was read to when its results were there; 0 if none was."""
    step_padded_tokens: int = 0
    """Tokens of the shape in which the step that was read ran; 0 if none was."""
    step_padding_tokens: int = 0
    """Those of them that were padding."""
    step_expert_imbalance: float = 0.0
    """Load of the most loaded expert (or device) over the mean in the step that was read; 0 if there is none."""


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    """One message from the engine core: the outputs of a step, and the state after it."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
    timestamp: float = 0.0


class EngineInfo(msgspec.Struct):
    """Sent once, when the engine core is ready."""

    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    """Of all data parallel ranks, like ``kv_cache_tokens``."""
    kv_cache_tokens: int
    max_prompt_tokens: int
    """Longest prompt that a rank's cache and (without chunked prefill) a step's budget can hold."""
    num_programs: int
    device: str
    startup_seconds: dict[str, float] = msgspec.field(default_factory=dict)

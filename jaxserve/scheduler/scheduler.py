"""Scheduler: the surface that the engine core drives; it decides every step and reads what came of it.

Steps may be scheduled before earlier ones are read. A token that a dispatched step will sample counts at once
(``num_inflight_tokens``); only its id is missing, and the device has that. So the next step is scheduled as
if the request went on; if it turns out to have ended, what the later steps sampled for it is dropped. Its
blocks are freed and handed on at once all the same, because device steps run in order: whatever an older step
still writes into a block, its new owner overwrites later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.errors import ConfigError, InvalidRequestError, QueueFullError
from jaxserve.kv_cache.manager import KVCacheManager
from jaxserve.kv_cache_spec import KVCacheGroup
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler.bursts import Bursts
from jaxserve.scheduler.lifecycle import Lifecycle, make_output
from jaxserve.scheduler.padding import StepSizes
from jaxserve.scheduler.planner import StepPlanner
from jaxserve.scheduler.ranks import Rank
from jaxserve.scheduler.step_plan import StepPlan
from jaxserve.scheduler.step_results import check_stop, new_prompt_logprobs
from jaxserve.step import (
    BurstLimits,
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    TokenMask,
)
from jaxserve.structured_output.request_grammar import MaskFiller, RequestGrammar, wait_for_any


class Scheduler:
    """Decides every step. Not thread-safe: one thread calls everything.

    Each ``schedule()`` that hands out tokens must be executed at once and come back through
    ``update_from_output``, in the same order, a failed step too (with ``failed``). Further steps may be
    scheduled in between.

    Args:
        config: resolved; ``max_num_seqs`` and ``max_num_batched_tokens`` are numbers.
        cache: whether prefixes are cached.
        kv_cache_groups: layers that share a block table.
        num_blocks: blocks in each rank's pool, its dummy included.
        block_size: tokens in a block.
        max_model_len: prompt and output tokens of a request at most.
        mask_filler: works out the token masks of requests with a grammar; None takes no such requests.
        data_parallel_size: ranks; ``max_num_seqs`` and ``max_num_batched_tokens`` hold for each.
        separate_paths, bursts, step_sizes: as ``RunnerInfo`` has them.

    Raises:
        ConfigError: the limits contradict each other.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        kv_cache_groups: Sequence[KVCacheGroup],
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        mask_filler: MaskFiller | None = None,
        data_parallel_size: int = 1,
        separate_paths: bool = False,
        bursts: BurstLimits | None = None,
        step_sizes: Sequence[int] = (),
    ) -> None:
        max_num_seqs, max_num_batched_tokens = _resolved_limits(config)
        self.config = config
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.kv_caches = [
            KVCacheManager(
                kv_cache_groups,
                num_blocks,
                block_size,
                enable_prefix_caching=cache.enable_prefix_caching,
                max_step_tokens=max(max_num_batched_tokens, 1 if bursts is None else bursts.num_steps),
                name="the KV cache" if data_parallel_size == 1 else "the KV cache of one data parallel rank",
                separate_paths=separate_paths,
            )
            for _ in range(data_parallel_size)
        ]
        """One of each rank, all of one size."""
        self._lifecycle = Lifecycle(
            [Rank(index, kv_cache) for index, kv_cache in enumerate(self.kv_caches)], config.scheduling_policy
        )
        self._bursts = None if bursts is None else Bursts(bursts)
        self._planner = StepPlanner(
            self._lifecycle,
            max_num_seqs,
            max_num_batched_tokens,
            config.enable_chunked_prefill,
            separate_paths,
            self._bursts,
            StepSizes(step_sizes)
            if step_sizes and config.enable_chunked_prefill and data_parallel_size == 1
            else None,
        )
        self._separate_paths = separate_paths
        self._mask_filler = mask_filler
        self._steps: dict[int, StepPlan] = {}
        """Steps that are scheduled and not read, oldest first."""
        self._next_step_id = 0
        self._step_tokens = 0
        self._outputs: list[EngineCoreOutput] = []

    # --- requests come and go -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run here; the parameter at fault is named.
            QueueFullError: ``max_num_queued_reqs`` requests wait already.
        """
        self._check_runnable(request)
        limit, num_waiting = self.config.max_num_queued_reqs, self._lifecycle.num_waiting
        if limit is not None and num_waiting >= limit:
            raise QueueFullError(f"{num_waiting} requests wait already (max_num_queued_reqs is {limit}).")
        if self._bursts is not None:
            request.draw = self._bursts.draw_of(request)
        self._lifecycle.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state, without an output. Unknown and finished ids are ignored."""
        for request in self._live(request_ids):
            self._lifecycle.finish(request, FinishReason.ABORT)
        self._lifecycle.drop_finished()

    def fail_requests(self, request_ids: Iterable[str], reason: str) -> list[EngineCoreOutput]:
        """End requests with an error; nothing that they wrote to the cache is reused. Unknown ids are
        ignored."""
        outputs = [self._fail(request, reason) for request in self._live(request_ids)]
        self._lifecycle.drop_finished()
        return outputs

    def running_request_ids(self) -> list[str]:
        """Requests that hold blocks."""
        return [request.request_id for request in self.running]

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._lifecycle.requests)

    def has_work(self) -> bool:
        """Whether to go on stepping: a request waits or runs, or ``take_outputs`` has something."""
        return bool(self._lifecycle.requests or self._outputs)

    @property
    def running(self) -> Sequence[Request]:
        """The requests that hold blocks and a row of the runner's batch, rank by rank; preemption takes a rank's
        last first."""
        return [request for rank in self._lifecycle.ranks for request in rank.running]

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Outputs that arose while a step was scheduled: requests that turned out not to fit the cache alone.

        ``update_from_output`` returns them too, if they were not taken before.
        """
        outputs, self._outputs = self._outputs, []
        return outputs

    def wait_for_grammar(self, seconds: float) -> None:
        """Sleep until one of the grammars that requests wait for is compiled; not at all if there are none."""
        pending = [request.grammar for request in self._lifecycle.pending.values() if request.grammar]
        if pending:
            wait_for_any(pending, seconds)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests go on; what they have computed so far is not
        shared."""
        for rank in self._lifecycle.ranks:
            rank.kv_cache.reset_prefix_cache(rank.running)

    def stats(self) -> SchedulerStats:
        """The state now, of all ranks together. ``step_tokens`` is of the last step scheduled;
        ``num_compilations`` is the runner's."""
        stats = SchedulerStats(
            num_waiting=self._lifecycle.num_waiting,
            num_preemptions=self._lifecycle.num_preemptions,
            step_tokens=self._step_tokens,
            num_deferred=len(self._lifecycle.pending),
        )
        for rank in self._lifecycle.ranks:
            pool, prefix_cache = rank.kv_cache.pool, rank.kv_cache.prefix_cache_stats
            stats.num_running += len(rank.running)
            stats.num_blocks += pool.num_blocks
            stats.num_free_blocks += pool.num_free
            stats.prefix_cache_queries += prefix_cache.queries
            stats.prefix_cache_hits += prefix_cache.hits
        stats.kv_cache_usage = 1.0 - stats.num_free_blocks / (stats.num_blocks - len(self.kv_caches))
        return stats

    def _live(self, request_ids: Iterable[str]) -> list[Request]:
        requests = self._lifecycle.requests
        return [requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in requests]

    def _check_runnable(self, request: Request) -> None:
        num_prompt = request.num_prompt_tokens
        if num_prompt == 0:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        if num_prompt >= self.max_model_len:
            raise _too_long(
                f"The prompt has {num_prompt} tokens, but the context length is {self.max_model_len}, output "
                "included. Shorten the prompt."
            )
        if num_prompt > self.max_num_batched_tokens and not self.config.enable_chunked_prefill:
            raise _too_long(
                f"The prompt has {num_prompt} tokens, but a step has {self.max_num_batched_tokens} "
                "(max_num_batched_tokens) and chunked prefill is off. Shorten the prompt, raise "
                "max_num_batched_tokens or enable chunked prefill."
            )
        if not self.kv_caches[0].fits_alone(num_prompt):
            raise _too_long(
                f"The prompt has {num_prompt} tokens; {self.kv_caches[0].describe()} is too small for it. "
                "Shorten the prompt or give the cache more memory."
            )

    # --- steps ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """Choose the next step. If it has no tokens, it holds nothing at all and need not be executed or
        read.

        Args:
            now: ``time.monotonic()``, noted as the start of requests that are scheduled for the first time.
        """
        step = StepPlan(self._next_step_id, self._separate_paths)
        self._planner.fill(step, now)
        self._outputs += step.failed
        self._step_tokens = step.count_tokens()
        if self._step_tokens == 0:
            return SchedulerOutput(step.step_id)  # rows that end are named in the next step that is executed
        for request in (*(row[0] for row in step.other_rows), *step.replayed):
            # For later steps: this one may read the blocks before they are written.
            self.kv_caches[request.data_rank].cache_blocks(request)
        step.order_rows(len(self.kv_caches))
        self._next_step_id += 1
        self._steps[step.step_id] = step
        return step.to_output(*self._lifecycle.take_departed(), self._token_masks(step))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in what a step produced.

        Returns:
            One output for each request to which the step brought a token, prompt log probabilities or its
            end.

        Raises:
            RuntimeError: steps are not read in the order in which they were scheduled.
        """
        outputs = self.take_outputs()
        if not scheduler_output.num_scheduled_tokens:
            return outputs
        step = self._oldest_step(scheduler_output.step_id, runner_output.step_id)
        if runner_output.failed:
            outputs += self._fail_rows(step, runner_output.failed)
        prompt_logprobs = new_prompt_logprobs(step, runner_output) if step.scoring_rows else {}
        sampled, logprobs = runner_output.sampled_token_ids, runner_output.logprobs
        constrained: list[RequestGrammar] = []
        for request in step.sampling_rows():
            if request.status is RequestStatus.FINISHED:
                continue  # it ended after this step was scheduled
            request_id = request.request_id
            token_ids = sampled.get(request_id)
            if token_ids is None:
                prompt_logprobs.pop(request_id, None)
                if request_id in runner_output.exhausted:
                    outputs.append(self._lifecycle.refuse(request, _nothing_left(request)))
                else:
                    outputs.append(self._fail(request, "The step returned no token for this request."))
                continue
            token_id, finish_reason = token_ids[0], None
            if len(token_ids) > 1:
                token_ids = self._read_burst(request, token_ids)
                token_id = token_ids[-1]
            else:
                request.num_inflight_tokens -= 1
                request.all_token_ids.append(token_id)
            num_known = len(request.all_token_ids)
            if num_known >= request.next_cache_at:
                self.kv_caches[request.data_rank].cache_blocks(request)
            if request.grammar is not None:
                try:
                    token_ids = self._follow_grammar(request, request.grammar, token_id)
                except InvalidRequestError as error:
                    prompt_logprobs.pop(request_id, None)
                    outputs.append(self._lifecycle.refuse(request, error))
                    continue
                finish_reason = request.finish_reason
                if finish_reason is None:
                    constrained.append(request.grammar)
            elif (
                num_known > request.max_computed_tokens
                or token_id in request.stop_token_ids
                or request.detects_repetition
            ):
                finish_reason = check_stop(request, token_id)
                if finish_reason is not None:
                    self._lifecycle.finish(request, finish_reason)
            outputs.append(
                EngineCoreOutput(
                    request_id,
                    token_ids,
                    logprobs.get(request_id) if logprobs else None,
                    prompt_logprobs.pop(request_id, None) if prompt_logprobs else None,
                    finish_reason,
                    request.stop_reason,
                    request.num_cached_tokens,
                    request.num_preemptions,
                    request.first_scheduled_time,
                )
            )
        for request_id, scored in prompt_logprobs.items():  # chunks that do not reach the end of the prompt
            outputs.append(make_output(self._lifecycle.requests[request_id], scored))
        if constrained and self._mask_filler is not None:
            self._mask_filler.start(constrained)
        self._lifecycle.drop_finished()
        return outputs

    def _read_burst(self, request: Request, token_ids: list[int]) -> list[int]:
        """Take a burst's tokens up to the request's end, if that is among them; those taken."""
        request.num_inflight_tokens -= len(token_ids)
        for index, token_id in enumerate(token_ids, 1):
            request.all_token_ids.append(token_id)
            if (token_id in request.stop_token_ids or request.detects_repetition) and check_stop(
                request, token_id
            ):
                return token_ids[:index]
        return token_ids

    def _follow_grammar(self, request: Request, grammar: RequestGrammar, token_id: int) -> list[int]:
        """Take a sampled token, the request's last one, and append what must follow it.

        Where the grammar leaves no choice, tokens need no sampling: they are computed by the next step, all at once.
        Notes the end of the request (``finish_reason``), if it is reached.

        Returns:
            The tokens of this step.

        Raises:
            InvalidRequestError: the grammar became too complex.
        """
        token_ids = [token_id]
        forced = grammar.accept(token_id)
        finish_reason = check_stop(request, token_id)
        for forced_id in forced:
            if finish_reason is not None:
                break
            request.all_token_ids.append(forced_id)
            request.has_appended = True
            token_ids.append(forced_id)
            finish_reason = check_stop(request, forced_id)
        if finish_reason is None and grammar.ended:
            finish_reason = FinishReason.STOP  # though ignore_eos or min_tokens would have it go on
        if finish_reason is not None:
            self._lifecycle.finish(request, finish_reason)
        return token_ids

    def _token_masks(self, step: StepPlan) -> dict[str, TokenMask]:
        if self._mask_filler is None or self._lifecycle.num_constrained == 0:
            return {}
        grammars = step.grammars()
        self._mask_filler.start(list(grammars.values()))
        return dict(grammars)

    def _oldest_step(self, scheduled_id: int, read_id: int) -> StepPlan:
        expected = next(iter(self._steps), None)
        if not expected == scheduled_id == read_id:
            raise RuntimeError(
                f"Steps must be read in order: expected step {expected}, got the output of step {read_id} "
                f"for step {scheduled_id}."
            )
        return self._steps.pop(scheduled_id)

    def _fail_rows(self, step: StepPlan, failed: dict[str, str]) -> list[EngineCoreOutput]:
        rows = [row for row in step.all_rows() if row.request_id in failed]
        if any(row.num_preemptions or row.status is not RequestStatus.RUNNING for row in rows):
            self.reset_prefix_cache()  # their blocks are gone, perhaps, but could still be found
        return [self._fail(row, failed[row.request_id]) for row in rows if not row.finished]

    def _fail(self, request: Request, reason: str) -> EngineCoreOutput:
        self.kv_caches[request.data_rank].uncache_blocks(request)
        return self._lifecycle.fail(request, reason)


def _resolved_limits(config: SchedulerConfig) -> tuple[int, int]:
    max_num_seqs, max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
    if max_num_seqs is None or max_num_batched_tokens is None:
        raise ConfigError("The scheduler needs resolved limits (max_num_seqs, max_num_batched_tokens).")
    if max_num_seqs > max_num_batched_tokens:
        raise ConfigError(
            f"max_num_seqs ({max_num_seqs}) is greater than max_num_batched_tokens "
            f"({max_num_batched_tokens}): a step could not decode all its requests. Lower the first or raise "
            "the second.",
            param="max_num_seqs",
        )
    return max_num_seqs, max_num_batched_tokens


def _nothing_left(request: Request) -> InvalidRequestError:
    param = "structured_outputs" if request.sampling_params.allowed_token_ids is None else "allowed_token_ids"
    return InvalidRequestError(
        f"{param}: after {request.num_output_tokens} output tokens no token is left that structured_outputs and "
        "allowed_token_ids both allow.",
        param=param,
    )


def _too_long(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="prompt", code="context_length_exceeded")

"""Scheduler: which requests compute how many tokens in the next step, and what their sampled tokens mean.

The central idea: there is no prefill and no decode. Every request has ``num_computed_tokens`` chasing the number of
its tokens, and a step is a choice of how far each of them catches up, within one budget of tokens. A long prompt
(chunked prefill), a cached prefix (it starts further on), a decoding request (one token behind) and a preempted one
(it starts again at zero) are the same arithmetic.

Steps may be scheduled before earlier ones are read. A token that a dispatched step will sample counts at once
(``num_inflight_tokens``), only its id is missing, and the device has that. So the next step is scheduled as if the
request went on; if it turns out to have ended, what the later steps sampled for it is dropped. Blocks are freed and
handed on at once all the same, because device steps run in order: whatever an older step still writes into a block,
the new owner overwrites later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.errors import ConfigError, InvalidRequestError, QueueFullError
from jaxserve.kv_cache.manager import KVCacheManager, PrefixHit
from jaxserve.kv_cache_spec import KVCacheGroup
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler.queues import make_queue
from jaxserve.scheduler.step_plan import StepPlan, new_request_data
from jaxserve.scheduler.step_results import check_stop, new_prompt_logprobs
from jaxserve.step import (
    CachedRequestData,
    EngineCoreOutput,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
    SchedulerStats,
    TokenLogprobs,
)


class Scheduler:
    """Decides every step. Not thread-safe: one thread calls everything.

    Each ``schedule()`` that hands out tokens must be executed and come back through ``update_from_output`` in the same
    order, a failed step too (with ``failed``); up to two steps may be outstanding in between.

    Args:
        config: resolved; ``max_num_seqs`` and ``max_num_batched_tokens`` are numbers.
        cache: whether prefixes are cached.
        kv_cache_groups: layers that share a block table.
        num_blocks: blocks in the pool, the dummy included.
        block_size: tokens in a block.
        max_model_len: prompt and output tokens of a request at most.

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
    ) -> None:
        max_num_seqs, max_num_batched_tokens = config.max_num_seqs, config.max_num_batched_tokens
        if max_num_seqs is None or max_num_batched_tokens is None:
            raise ConfigError(
                "max_num_seqs and max_num_batched_tokens are not resolved.", param="max_num_seqs"
            )
        if max_num_seqs > max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs ({max_num_seqs}) is greater than max_num_batched_tokens ({max_num_batched_tokens}): a "
                "step could not decode all its requests.",
                param="max_num_seqs",
            )
        self.config = config
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.kv_cache = KVCacheManager(
            kv_cache_groups,
            num_blocks,
            block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            max_step_tokens=max_num_batched_tokens,
        )
        self.requests: dict[str, Request] = {}
        self.waiting = make_queue(config.scheduling_policy)
        self.running: list[Request] = []
        """In ``Request.order``: the last one is the first to be preempted."""
        self._steps: dict[int, StepPlan] = {}
        self._outputs: list[EngineCoreOutput] = []
        self._finished_ids: list[str] = []
        self._preempted_ids: list[str] = []
        self._num_to_drop = 0
        self._num_steps = 0
        self._num_added = 0
        self._num_preemptions = 0
        self._step_tokens = 0

    # --- requests come and go --------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run here; the parameter at fault is named.
            QueueFullError: ``max_num_queued_reqs`` requests wait already.
        """
        self._check_admissible(request)
        limit = self.config.max_num_queued_reqs
        if limit is not None and len(self.waiting) >= limit:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already (max_num_queued_reqs is {limit})."
            )
        self._num_added += 1
        if self.config.scheduling_policy == "priority":
            request.order = (request.priority, request.arrival_time, self._num_added)
        else:
            request.order = (0, 0.0, self._num_added)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state, without an output. Unknown and finished ids are ignored."""
        aborted = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in aborted:
            self._finish(request, FinishReason.ABORT)
        self._drop_finished()

    def fail_requests(self, request_ids: Iterable[str], reason: str) -> list[EngineCoreOutput]:
        """End requests with an error; nothing that they wrote to the cache is reused. Unknown ids are ignored."""
        failed = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        outputs = [self._fail(request, reason) for request in failed]
        self._drop_finished()
        return outputs

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.requests)

    def has_work(self) -> bool:
        """Whether the engine should go on stepping: a request waits or runs, or ``take_outputs`` holds something."""
        return bool(self.requests or self._outputs)

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Outputs that arose outside of reading a step: requests that ``schedule`` found not to fit the cache.

        The next ``update_from_output`` returns them too, unless they are taken here before.
        """
        outputs, self._outputs = self._outputs, []
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Running requests go on; what they have computed so far is not shared."""
        self.kv_cache.reset_prefix_cache(self.running)

    def stats(self) -> SchedulerStats:
        """The state now; ``step_tokens`` is of the last step scheduled, ``num_compilations`` is the runner's to set."""
        prefix_cache, pool = self.kv_cache.prefix_cache_stats, self.kv_cache.pool
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=pool.usage,
            prefix_cache_queries=prefix_cache.queries,
            prefix_cache_hits=prefix_cache.hits,
            num_preemptions=self._num_preemptions,
            step_tokens=self._step_tokens,
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
        )

    def _check_admissible(self, request: Request) -> None:
        num_prompt = request.num_prompt_tokens
        if request.request_id in self.requests:
            raise InvalidRequestError(
                f"A request with id {request.request_id!r} is running.", param="request_id"
            )
        if num_prompt == 0:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        if num_prompt >= self.max_model_len:
            raise InvalidRequestError(
                f"The prompt has {num_prompt} tokens, but prompt and output may have {self.max_model_len} together. "
                "Shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        if not self.config.enable_chunked_prefill and num_prompt > self.max_num_batched_tokens:
            raise InvalidRequestError(
                f"The prompt has {num_prompt} tokens, more than max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) in one step, and chunked prefill is off. Shorten the prompt, raise "
                "max_num_batched_tokens or enable chunked prefill.",
                param="prompt",
                code="context_length_exceeded",
            )
        if not self.kv_cache.fits_alone(num_prompt):
            raise InvalidRequestError(
                f"The prompt has {num_prompt} tokens; {self._cache_size()} is too small for it. Shorten the prompt or "
                "give the cache more memory.",
                param="prompt",
                code="context_length_exceeded",
            )

    def _cache_size(self) -> str:
        num_blocks = self.kv_cache.pool.num_blocks - 1
        return f"the KV cache ({num_blocks} blocks of {self.kv_cache.block_size} tokens)"

    # --- the next step ---------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """Choose the next step. If it has no tokens it holds nothing at all and need not be executed.

        Args:
            now: ``time.monotonic()``, noted as the start of requests that are scheduled for the first time.
        """
        step = StepPlan(self._num_steps)
        num_preemptions = self._num_preemptions
        self._schedule_running(step)
        if self._num_preemptions == num_preemptions:
            self._schedule_waiting(step, now)
        step.num_tokens = self._step_tokens = step.count_tokens()
        if step.num_tokens == 0:
            return SchedulerOutput(
                step.step_id
            )  # ids of finished and preempted requests go out with the next one
        for request, _, _ in step.other_rows:
            self.kv_cache.cache_blocks(request)
        self._num_steps += 1
        self._steps[step.step_id] = step
        output = step.to_output(self._finished_ids, self._preempted_ids)
        self._finished_ids, self._preempted_ids = [], []
        return output

    def _schedule_running(self, step: StepPlan) -> None:
        """Give every running request what it lacks, oldest first. One token is set aside for each of them, so that a
        long prompt never stops the others; max_num_seqs <= max_num_batched_tokens makes that possible."""
        running = self.running
        spare = self.max_num_batched_tokens - len(running)
        decode_rows = step.decode_rows
        for request in running:  # preemption takes from the end: never a request that has its row already
            num_computed = request.num_computed_tokens
            if num_computed >= request.max_computed_tokens:
                continue  # its last token is in flight
            num_new = len(request.all_token_ids) + request.num_inflight_tokens - num_computed
            if num_new == 1:
                if request.needs_sync and request.num_inflight_tokens:
                    continue
                if num_computed >= request.num_slots and not self._grow(request, 1, step):
                    continue
                request.num_computed_tokens = num_computed + 1
                request.num_inflight_tokens += 1
                decode_rows.append(request)
            elif num_granted := self._grow(request, min(num_new, spare + 1), step):
                spare -= num_granted - 1
                step.add(request, num_granted, samples=num_granted == num_new)

    def _grow(self, request: Request, num_new: int, step: StepPlan) -> int:
        """Get slots for a running request's next tokens, preempting from the end if need be.

        Returns:
            The tokens it has slots for; 0 if it was itself preempted, or failed because the whole cache is too small.
        """
        while (new_block_ids := self.kv_cache.allocate_slots(request, num_new)) is None:
            if len(self.running) == 1:
                num_new = self.kv_cache.num_allocatable_tokens(request)
                if num_new == 0:
                    self.running.pop()
                    self._outputs.append(self._fail_too_large(request))
                    return 0
                continue
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return 0
        if new_block_ids[0]:
            step.grown.append(
                CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens)
            )
        return num_new

    def _preempt(self, request: Request) -> None:
        """Make a request start again later; it was taken out of ``running``. Its tokens in flight still count."""
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._preempted_ids.append(request.request_id)
        self.waiting.put_back(request)

    def _schedule_waiting(self, step: StepPlan, now: float) -> None:
        """Let waiting requests in, in order, while tokens, rows and blocks last.

        A request whose next block is filled by this very step waits for the next one, where it finds that block in
        the prefix cache: n completions of one prompt compute it once. Others may pass it meanwhile.
        """
        waiting, max_num_seqs = self.waiting, self.max_num_seqs
        budget = self.max_num_batched_tokens - step.count_tokens()
        if not waiting or budget == 0:
            return
        for request, num_tokens, _ in step.other_rows:
            self._note_pending(step, request, num_tokens)
        deferred: list[Request] = []
        while budget and waiting and len(self.running) < max_num_seqs and len(deferred) < max_num_seqs:
            request = waiting.peek()
            hit = self._find_hit(request)
            if hit is not None and self._next_block_is_pending(request, hit, step):
                deferred.append(waiting.pop())
                continue
            num_admitted = self._admit(request, hit, budget, step, now)
            if num_admitted == 0:
                break
            budget -= num_admitted
        for request in reversed(deferred):
            waiting.put_back(request)

    def _find_hit(self, request: Request) -> PrefixHit | None:
        """The cached prefix of a waiting request; None if it must not read the cache.

        Log probabilities of prompt tokens need their logits, so those tokens are computed.
        """
        scores_prompt = request.sampling_params.prompt_logprobs is not None
        if not self.kv_cache.enable_prefix_caching:
            return None
        if scores_prompt and request.num_sent_logprobs < request.num_prompt_tokens - 1:
            return None
        return self.kv_cache.get_computed_blocks(request)

    def _next_block_is_pending(self, request: Request, hit: PrefixHit, step: StepPlan) -> bool:
        next_end = hit.num_tokens + self.kv_cache.block_size
        if next_end >= request.num_tokens:
            return False  # the block with the last token is computed in any case
        return request.block_hashes[next_end // self.kv_cache.block_size - 1] in step.pending_hashes

    def _note_pending(self, step: StepPlan, request: Request, num_tokens: int) -> None:
        """Note the blocks that a row of ``num_tokens``, already added, fills in this step."""
        end, block_size = request.num_computed_tokens, self.kv_cache.block_size
        step.pending_hashes.update(request.block_hashes[(end - num_tokens) // block_size : end // block_size])

    def _admit(self, request: Request, hit: PrefixHit | None, budget: int, step: StepPlan, now: float) -> int:
        """Start the first waiting request, if it fits. Returns its tokens in this step, 0 if it must wait (or failed).

        Beside what it needs itself, a block must be free for each running request to grow into. Otherwise it would be
        let in only to be preempted a few steps later.
        """
        if request.num_inflight_tokens:
            return 0  # preempted, and its last token is not read yet
        start = hit or self.kv_cache.no_hit()
        num_missing = request.num_tokens - start.num_tokens
        num_new = min(num_missing, budget)
        if num_new < num_missing <= self.max_num_batched_tokens and not self.config.enable_chunked_prefill:
            return 0
        block_ids = self.kv_cache.allocate_slots(
            request, num_new, start, num_reserved_blocks=len(self.running)
        )
        if block_ids is None:
            if self.running:
                return 0
            num_new = self.kv_cache.num_allocatable_tokens(request, start)
            if num_new == 0:
                self._outputs.append(self._fail_too_large(request))
                return 0
            block_ids = self.kv_cache.allocate_slots(request, num_new, start)
            assert block_ids is not None
        self._note_started(request, hit, now)
        step.new_requests.append(new_request_data(request, block_ids))
        step.add(request, num_new, samples=num_new == num_missing)
        self._note_pending(step, request, num_new)
        return num_new

    def _note_started(self, request: Request, hit: PrefixHit | None, now: float) -> None:
        """Move the first waiting request to ``running``."""
        self.waiting.pop()
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_order)
        if request.first_scheduled_time is not None:
            return
        request.first_scheduled_time = now
        if hit is not None:
            request.num_cached_tokens = hit.num_tokens
            self.kv_cache.prefix_cache_stats.queries += request.num_tokens
            self.kv_cache.prefix_cache_stats.hits += hit.num_tokens

    # --- what a step produced --------------------------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in the tokens of a step; steps are read in the order in which they were scheduled.

        Returns:
            One output for each request that the step brought a token, prompt log probabilities or its end.
        """
        outputs = self.take_outputs()
        if not scheduler_output.num_scheduled_tokens:
            return outputs
        step = self._steps.pop(scheduler_output.step_id)
        if runner_output.failed:
            outputs += self._fail_rows(step, runner_output.failed)
        prompt_logprobs = new_prompt_logprobs(step, runner_output) if step.scoring_rows else {}
        sampled, logprobs = runner_output.sampled_token_ids, runner_output.logprobs
        for request in step.sampling_rows():
            if request.status is RequestStatus.FINISHED:
                continue  # it ended after this step was scheduled
            request_id = request.request_id
            token_ids = sampled.get(request_id)
            if token_ids is None:
                outputs.append(self._fail(request, "The step returned no token for this request."))
                continue
            (token_id,) = token_ids
            request.num_inflight_tokens -= 1
            request.all_token_ids.append(token_id)
            num_known = len(request.all_token_ids)
            if num_known >= request.next_cache_at:
                self.kv_cache.cache_blocks(request)
            finish_reason = None
            if num_known > request.max_computed_tokens or token_id in request.stop_token_ids:
                finish_reason = check_stop(request, token_id)
                if finish_reason is not None:
                    self._finish(request, finish_reason)
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
        for request_id, scored in prompt_logprobs.items():  # chunks that did not reach the prompt's end
            outputs.append(self._output(self.requests[request_id], prompt_logprobs=scored))
        self._drop_finished()
        return outputs

    def _fail_rows(self, step: StepPlan, failed: dict[str, str]) -> list[EngineCoreOutput]:
        rows = [
            request for request in step.all_rows() if request.request_id in failed and not request.finished
        ]
        return [self._fail(request, failed[request.request_id]) for request in rows]

    def _fail(self, request: Request, reason: str) -> EngineCoreOutput:
        self.kv_cache.uncache_blocks(request)
        self._finish(request, FinishReason.ERROR)
        output = self._output(request)
        output.error = reason
        return output

    def _fail_too_large(self, request: Request) -> EngineCoreOutput:
        return self._fail(
            request,
            f"The request has {request.num_tokens} tokens now; {self._cache_size()} is too small for more, though no "
            "other request runs. Lower max_tokens or give the cache more memory.",
        )

    def _output(
        self, request: Request, prompt_logprobs: list[TokenLogprobs] | None = None
    ) -> EngineCoreOutput:
        """An output without a token."""
        return EngineCoreOutput(
            request.request_id,
            [],
            prompt_logprobs=prompt_logprobs,
            finish_reason=request.finish_reason,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            first_scheduled_time=request.first_scheduled_time,
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state; ``_drop_finished`` must follow if it may be in ``running``."""
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        if was_running:
            self.kv_cache.free(request)
            self._finished_ids.append(request.request_id)
            self._num_to_drop += 1
        else:
            self.waiting.discard()

    def _drop_finished(self) -> None:
        if self._num_to_drop:
            self.running = [request for request in self.running if not request.finished]
            self._num_to_drop = 0


def _order(request: Request) -> tuple[int, float, int]:
    return request.order

"""StepPlanner: how far each request gets in the next step.

The central idea: there is no prefill and no decode. Every request has ``num_computed_tokens`` chasing the
number of its tokens, and a step is a choice of how far each of them catches up, within one budget of tokens.
A long prompt (chunked prefill), a cached prefix (it starts further on), a decoding request (one token behind)
and a preempted one (it starts again at zero) are the same arithmetic.

Nobody starves: each running request has a token set aside, so that a long prompt does not stop the others;
waiting requests enter in order, and nobody enters in a step that preempted. Nobody thrashes: who enters must
fit as a whole, with a block to spare for each running request.
"""

from __future__ import annotations

from jaxserve.kv_cache.manager import KVCacheManager, PrefixHit
from jaxserve.request import Request
from jaxserve.scheduler.lifecycle import Lifecycle
from jaxserve.scheduler.step_plan import StepPlan, new_request_data
from jaxserve.step import CachedRequestData, EngineCoreOutput

SMALLEST_STEP = 8
"""Padded tokens of a small step; above it sizes are powers of two."""


class StepPlanner:
    """Fills steps.

    Args:
        lifecycle: the requests.
        kv_cache: their blocks.
        max_num_seqs: rows of a step at most.
        max_num_batched_tokens: tokens of a step at most; not fewer than ``max_num_seqs``.
        enable_chunked_prefill: whether a prompt may be split over steps.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        kv_cache: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
    ) -> None:
        self.lifecycle = lifecycle
        self.kv_cache = kv_cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill

    def fill(self, step: StepPlan, now: float) -> None:
        """Add the rows of a step: running requests first, then waiting ones."""
        if self.lifecycle.pending:
            step.failed += self.lifecycle.admit_compiled()
        num_preemptions = self.lifecycle.num_preemptions
        self._add_running(step)
        if self.lifecycle.num_preemptions == num_preemptions:
            self._add_waiting(step, now)

    def _add_running(self, step: StepPlan) -> None:
        running, decode_rows = self.lifecycle.running, step.decode_rows
        spare = self.max_num_batched_tokens - len(running)  # beside the token set aside for each
        hold, jump = self._hold_and_jump() if self.lifecycle.num_constrained else (False, 0)
        for request in running:  # preemption takes from the end: never a request that has its row already
            num_computed = request.num_computed_tokens
            if num_computed >= request.max_computed_tokens:
                continue  # its last token is in flight
            num_new = len(request.all_token_ids) + request.num_inflight_tokens - num_computed
            if num_new == 1:
                if request.needs_sync and (hold or request.num_inflight_tokens):
                    continue
                if num_computed >= request.num_slots and not self._grow(request, 1, step):
                    continue
                request.num_computed_tokens = num_computed + 1  # StepPlan.add, written out: the hot path
                request.num_inflight_tokens += 1
                decode_rows.append(request)
                continue
            jumps = _jumps(request)
            if jumps and hold:
                continue
            if num_granted := self._grow(
                request, min(num_new, (jump if jumps else spare) + 1, spare + 1), step
            ):
                spare -= num_granted - 1
                jump -= num_granted - 1 if jumps else 0
                step.add(request, num_granted, samples=num_granted == num_new)
        self.lifecycle.drop_finished()

    def _hold_and_jump(self) -> tuple[bool, int]:
        """Whether rows that wait for the host are held back in this step, and how far grammars may jump in it.

        Rows that wait for the host go together: in two groups of which one is always in flight, each would be in every
        other step only. So where most of them are in flight, the others are held until these are read.

        A step's cost follows its padded size. So tokens that grammars appended fill up the padding, and double the
        size only where they fill that as well: where a step is limited by arithmetic, anything more would cost the
        other rows what it saves.

        Returns:
            whether to hold, and the appended tokens that may be computed beside one for each row.
        """
        num_rows = num_ready = num_in_flight = num_appended = 0
        for request in self.lifecycle.running:
            if not request.needs_sync:
                num_rows += 1
            elif request.num_inflight_tokens:
                num_in_flight += 1
            elif request.num_computed_tokens >= request.num_prompt_tokens:
                num_ready += 1
                if _jumps(request):
                    num_appended += request.num_tokens - request.num_computed_tokens - 1
        if num_in_flight >= num_ready:
            return True, 0
        num_rows += num_ready
        size = SMALLEST_STEP
        while size < num_rows or 2 * size <= num_rows + num_appended:
            size *= 2
        return False, size - num_rows

    def _grow(self, request: Request, num_new: int, step: StepPlan) -> int:
        """Get slots for a running request's next tokens, preempting from the end if need be.

        Returns:
            The tokens it has slots for; 0 if it was itself preempted or does not fit alone (then it fails).
        """
        running = self.lifecycle.running
        while (new_block_ids := self.kv_cache.allocate_slots(request, num_new)) is None:
            if len(running) > 1:
                if self.lifecycle.preempt_last() is request:
                    return 0
            elif (num_new := self.kv_cache.num_allocatable_tokens(request)) == 0:
                if request.num_inflight_tokens == 0:  # else one of those may be its last
                    step.failed.append(self._fail_too_large(request))
                return 0
        if new_block_ids[0]:
            grown = CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens)
            step.cached_requests.append(grown)
        return num_new

    def _add_waiting(self, step: StepPlan, now: float) -> None:
        """Let waiting requests in, in order, while tokens, rows and blocks last.

        A request whose next block is filled by this very step waits for the next one, where it finds that
        block in the prefix cache: n completions of one prompt compute it once. Others may pass it meanwhile.
        """
        waiting, running = self.lifecycle.waiting, self.lifecycle.running
        budget = self.max_num_batched_tokens - step.count_tokens()
        if not waiting or budget == 0:
            return
        filled: set[bytes] = set()
        for request, num_tokens, _ in step.other_rows:
            filled.update(self._hashes_filled(request, num_tokens))
        passed: list[Request] = []
        while budget and waiting and len(running) < self.max_num_seqs and len(passed) < self.max_num_seqs:
            request = waiting.peek()
            hit = self._find_hit(request)
            if hit is not None and self._next_block_is_in(filled, request, hit):
                passed.append(waiting.pop())
                continue
            num_admitted = self._admit(request, hit, budget, step, now)
            if num_admitted == 0:
                break
            filled.update(self._hashes_filled(request, num_admitted))
            budget -= num_admitted
        for request in reversed(passed):
            waiting.put_back(request)

    def _find_hit(self, request: Request) -> PrefixHit | None:
        """The cached prefix of a waiting request; None if it must not read the cache.

        Log probabilities of prompt tokens need their logits, so those tokens are computed.
        """
        if not self.kv_cache.enable_prefix_caching:
            return None
        unscored = request.num_prompt_tokens - 1 - request.num_sent_logprobs
        if request.sampling_params.prompt_logprobs is not None and unscored > 0:
            return None
        return self.kv_cache.get_computed_blocks(request)

    def _next_block_is_in(self, filled: set[bytes], request: Request, hit: PrefixHit) -> bool:
        end = hit.num_tokens + self.kv_cache.block_size
        if end >= request.num_tokens:
            return False  # the last token is computed in any case
        return request.block_hashes[end // self.kv_cache.block_size - 1] in filled

    def _hashes_filled(self, request: Request, num_tokens: int) -> list[bytes]:
        """Hashes of the blocks that a row of ``num_tokens``, already added, fills in this step."""
        end, block_size = request.num_computed_tokens, self.kv_cache.block_size
        return request.block_hashes[(end - num_tokens) // block_size : end // block_size]

    def _admit(self, request: Request, hit: PrefixHit | None, budget: int, step: StepPlan, now: float) -> int:
        """Start the first waiting request if it fits.

        Returns:
            Its tokens in this step; 0 if it must wait, or failed because it does not fit alone.
        """
        if request.num_inflight_tokens:
            return 0  # preempted, and its last token is not read yet
        start = hit or self.kv_cache.no_hit
        num_missing = request.num_tokens - start.num_tokens
        num_new = min(num_missing, budget)
        if num_new < num_missing <= self.max_num_batched_tokens and not self.enable_chunked_prefill:
            return 0  # a resumed request may have become longer than a step: that one is split all the same
        num_running = len(self.lifecycle.running)
        block_ids = self.kv_cache.allocate_slots(request, num_new, start, num_reserved_blocks=num_running)
        if block_ids is None and num_running == 0:
            num_new = self.kv_cache.num_allocatable_tokens(request, start)
            if num_new == 0:
                step.failed.append(self._fail_too_large(request))
                return 0
            block_ids = self.kv_cache.allocate_slots(request, num_new, start)
        if block_ids is None:
            return 0
        self.lifecycle.start(hit, now)
        step.new_requests.append(new_request_data(request, block_ids))
        step.add(request, num_new, samples=num_new == num_missing)
        return num_new

    def _fail_too_large(self, request: Request) -> EngineCoreOutput:
        return self.lifecycle.fail(
            request,
            f"The request has {request.num_tokens} tokens now; {self.kv_cache.describe()} is too small for "
            "more, though no other request runs. Lower max_tokens or give the cache more memory.",
        )


def _jumps(request: Request) -> bool:
    """Whether tokens beyond its next one were appended by its grammar (or are computed again)."""
    return request.grammar is not None and request.num_computed_tokens >= request.num_prompt_tokens

"""StepPlanner: how far each request gets in the next step.

The central idea: there is no prefill and no decode. Every request has ``num_computed_tokens`` chasing the
number of its tokens, and a step is a choice of how far each of them catches up, within one budget of tokens.
A long prompt (chunked prefill), a cached prefix (it starts further on), a decoding request (one token behind)
and a preempted one (it starts again at zero) are the same arithmetic.

Nobody starves: each running request has a token set aside, so that a long prompt does not stop the others;
waiting requests enter in order, and nobody enters in a step that preempted. Nobody thrashes: who enters must
fit as a whole, with a block to spare for each running request.

With data parallelism all this holds for each rank by itself, but the queue is one: its first request waits, and
all behind it, only if no rank takes it.

With ``separate_paths`` what a token is computed by follows from the request alone: prompt tokens as chunks, down to
chunks of one, generated ones as decoding rows, one a step. So a row's chunk ends where its prompt does, and what it
had generated before it was preempted is computed again one by one, among the others' decoding rows.
"""

from __future__ import annotations

from jaxserve.kv_cache.manager import KVCacheManager, PrefixHit
from jaxserve.request import Request
from jaxserve.scheduler.bursts import Bursts
from jaxserve.scheduler.lifecycle import Lifecycle
from jaxserve.scheduler.padding import StepSizes
from jaxserve.scheduler.ranks import Rank, StartOption, Vacancy, sort_options
from jaxserve.scheduler.step_plan import StepPlan, new_request_data
from jaxserve.step import CachedRequestData, EngineCoreOutput

SMALLEST_STEP = 8
"""Padded tokens of a small step; above it sizes are powers of two."""


class StepPlanner:
    """Fills steps.

    Args:
        lifecycle: the requests, and the ranks they are on.
        max_num_seqs: rows of a rank at most.
        max_num_batched_tokens: tokens of a rank in a step at most; not fewer than ``max_num_seqs``.
        enable_chunked_prefill: whether a prompt may be split over steps.
        separate_paths: as ``RunnerInfo`` has it.
        bursts: None plans none. There are none with several ranks.
        sizes: None trims no step. None is with several ranks, where one's step is as long as another's.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool,
        separate_paths: bool = False,
        bursts: Bursts | None = None,
        sizes: StepSizes | None = None,
    ) -> None:
        self.lifecycle = lifecycle
        self.ranks = lifecycle.ranks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.separate_paths = separate_paths
        self.bursts, self.sizes = bursts, sizes
        self._first_rank = 0
        """The rank that is preferred among equals: the one after the last that was chosen."""

    def fill(self, step: StepPlan, now: float) -> None:
        """Add the rows of a step: running requests first, then waiting ones."""
        lifecycle = self.lifecycle
        if lifecycle.pending:
            step.failed += lifecycle.admit_compiled()
        if self.bursts is not None and not lifecycle.num_waiting and self._add_burst(self.bursts, step):
            return
        hold, jumps = self._hold_and_jumps() if lifecycle.num_constrained else (False, None)
        entries: list[tuple[Rank, int]] = []
        for rank in self.ranks:
            num_preemptions, num_before = lifecycle.num_preemptions, step.count_tokens()
            self._add_running(rank, step, hold, jumps[rank.index] if jumps else 0)
            if lifecycle.num_preemptions == num_preemptions:
                entries.append((rank, step.count_tokens() - num_before))
        lifecycle.drop_finished()
        if lifecycle.waiting:
            budget = self.max_num_batched_tokens
            self._add_waiting(step, now, [Vacancy(rank, num, budget - num) for rank, num in entries])
        if self.sizes is not None:
            self.sizes.trim(step)

    def _add_running(self, rank: Rank, step: StepPlan, hold: bool, jump: int) -> None:
        running, decode_rows, separate_paths = rank.running, step.decode_rows, self.separate_paths
        spare = self.max_num_batched_tokens - len(running)  # beside the token set aside for each
        for request in running:  # preemption takes from the end: never a request that has its row already
            num_computed = request.num_computed_tokens
            if num_computed >= request.max_computed_tokens:
                continue  # its last token is in flight
            num_new = len(request.all_token_ids) + request.num_inflight_tokens - num_computed
            if num_new == 1 and not (separate_paths and num_computed < request.num_prompt_tokens):
                if request.needs_sync and (hold or request.num_inflight_tokens):
                    continue
                if num_computed >= request.num_slots and not self._grow(rank, request, 1, step):
                    continue
                request.num_computed_tokens = num_computed + 1  # StepPlan.add, written out: the hot path
                request.num_inflight_tokens += 1
                decode_rows.append(request)
                continue
            jumps = _jumps(request)
            if jumps and hold:
                continue
            most = min(self._on_one_path(request, num_computed, num_new), spare + 1)
            if num_granted := self._grow(rank, request, min(most, jump + 1) if jumps else most, step):
                spare -= num_granted - 1
                jump -= num_granted - 1 if jumps else 0
                step.add(request, num_granted, samples=num_granted == num_new)

    def _add_burst(self, bursts: Bursts, step: StepPlan) -> bool:
        """Make the step a burst, if there is to be one."""
        (rank,) = self.ranks
        if (num_steps := bursts.num_steps(rank)) == 1:
            return False
        rows: list[tuple[Request, int]] = []
        for request in rank.running:
            num_computed = request.num_computed_tokens
            num_tokens = min(num_steps, request.max_computed_tokens - num_computed)
            if num_tokens <= 0:
                continue  # its last token is in flight
            if num_computed + num_tokens > request.num_slots:
                self._grow(rank, request, num_tokens, step)  # it preempts nobody: each has a block
            rows.append((request, num_tokens))
        step.add_burst(rows)
        return True

    def _on_one_path(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """How many of a request's next ``num_tokens`` one step may compute."""
        if not self.separate_paths:
            return num_tokens
        return min(num_tokens, max(request.num_prompt_tokens - num_computed, 1))

    def _hold_and_jumps(self) -> tuple[bool, list[int]]:
        """Whether rows that wait for the host are held back in this step, and how far grammars may jump in it.

        Rows that wait for the host go together: in two groups of which one is always in flight, each would be in every
        other step only. So where most of them are in flight, the others are held until these are read.

        A step's cost follows its padded size. So tokens that grammars appended fill up the padding, and double the
        size only where they fill that as well: where a step is limited by arithmetic, anything more would cost the
        other rows what it saves.

        All ranks have the fullest one's size. So they hold back together, and what fills the padding is counted
        for each.

        Returns:
            whether to hold, and of each rank the appended tokens that may be computed beside one for each row.
        """
        num_ready = num_in_flight = num_appended = 0
        num_rows = [0] * len(self.ranks)
        for rank in self.ranks:
            for request in rank.running:
                if not request.needs_sync:
                    num_rows[rank.index] += 1
                elif request.num_inflight_tokens:
                    num_in_flight += 1
                elif request.num_computed_tokens >= request.num_prompt_tokens - 1:
                    # Its prompt's last token alone is left, or it decodes.
                    num_ready += 1
                    num_rows[rank.index] += 1
                    if _jumps(request):
                        num_appended += request.num_tokens - request.num_computed_tokens - 1
        if num_in_flight >= num_ready:
            return True, [0] * len(self.ranks)
        size, most, full = SMALLEST_STEP, max(num_rows), sum(num_rows) + num_appended
        while size < most or 2 * size * len(self.ranks) <= full:
            size *= 2
        return False, [size - num for num in num_rows]

    def _grow(self, rank: Rank, request: Request, num_new: int, step: StepPlan) -> int:
        """Get slots for a running request's next tokens, preempting from the end if need be.

        Returns:
            The tokens it has slots for; 0 if it was itself preempted or does not fit alone (then it fails).
        """
        kv_cache = rank.kv_cache
        while (new_block_ids := kv_cache.allocate_slots(request, num_new)) is None:
            if len(rank.running) > 1:
                if self.lifecycle.preempt_last(rank) is request:
                    return 0
            elif (num_new := kv_cache.num_allocatable_tokens(request)) == 0:
                if request.num_inflight_tokens == 0:  # else one of those may be its last
                    step.failed.append(self._fail_too_large(kv_cache, request))
                return 0
        if new_block_ids[0]:
            grown = CachedRequestData(request.request_id, new_block_ids, request.num_computed_tokens)
            step.cached_requests.append(grown)
        return num_new

    def _add_waiting(self, step: StepPlan, now: float, vacancies: list[Vacancy]) -> None:
        """Let waiting requests in, in order, while tokens, rows and blocks last.

        A request whose next block is filled by this very step, on the rank where it is best placed, waits for the
        next one, where it finds that block in the prefix cache: n completions of one prompt compute it once. Others
        may pass it meanwhile.
        """
        waiting, by_rank = self.lifecycle.waiting, {vacancy.rank.index: vacancy for vacancy in vacancies}
        if not any(map(self._is_open, vacancies)):
            return
        for request, num_tokens, _ in step.other_rows:
            if vacancy := by_rank.get(request.data_rank):
                vacancy.note(request, num_tokens)
        passed: list[Request] = []
        while waiting and len(passed) < self.max_num_seqs and any(map(self._is_open, vacancies)):
            if not self._place(waiting.peek(), vacancies, passed, step, now):
                break
        for request in reversed(passed):
            waiting.put_back(request)

    def _place(
        self, request: Request, vacancies: list[Vacancy], passed: list[Request], step: StepPlan, now: float
    ) -> bool:
        """Start the first waiting request on the best rank that takes it, or let it be passed.

        Returns:
            Whether the next one may have its turn.
        """
        for vacancy, hit, filler in self._start_options(request, vacancies):
            if filler is not None:
                passed.append(self.lifecycle.waiting.pop())
                return True
            if num_admitted := self._admit(request, vacancy, hit, step, now):
                vacancy.enter(request, num_admitted)
                return True
            if request.finished:
                break
        return False

    def _is_open(self, vacancy: Vacancy) -> bool:
        return vacancy.budget > 0 and len(vacancy.rank.running) < self.max_num_seqs

    def _start_options(self, request: Request, vacancies: list[Vacancy]) -> list[StartOption]:
        """Where the request could start, best first."""
        options: list[StartOption] = []
        for vacancy in vacancies:
            if len(vacancy.rank.running) >= self.max_num_seqs:
                continue
            hit = _find_hit(vacancy.rank.kv_cache, request)
            filler = vacancy.who_fills_next(request, hit)
            if vacancy.budget or filler is not None:
                options.append(StartOption(vacancy, hit, filler))
        if len(options) > 1:
            sort_options(request, options, self._first_rank, len(self.ranks))
        return options

    def _admit(
        self, request: Request, vacancy: Vacancy, hit: PrefixHit | None, step: StepPlan, now: float
    ) -> int:
        """Start the first waiting request on a rank if it fits.

        Returns:
            Its tokens in this step; 0 if it must wait, or failed because it does not fit alone.
        """
        if request.num_inflight_tokens:
            return 0  # preempted, and its last token is not read yet
        rank, kv_cache = vacancy.rank, vacancy.rank.kv_cache
        start = hit or kv_cache.no_hit
        num_missing = request.num_tokens - start.num_tokens
        num_wanted = self._on_one_path(request, start.num_tokens, num_missing)
        num_new = min(num_wanted, vacancy.budget)
        if num_new < num_wanted <= self.max_num_batched_tokens and not self.enable_chunked_prefill:
            return 0  # a resumed request may have become longer than a step: that one is split all the same
        num_running = len(rank.running)
        block_ids = kv_cache.allocate_slots(request, num_new, start, num_reserved_blocks=num_running)
        if block_ids is None and num_running == 0:
            num_new = kv_cache.num_allocatable_tokens(request, start)
            if num_new == 0:
                step.failed.append(self._fail_too_large(kv_cache, request))
                return 0
            block_ids = kv_cache.allocate_slots(request, num_new, start)
        if block_ids is None:
            return 0
        self.lifecycle.start(rank, hit, now)
        self._first_rank = (rank.index + 1) % len(self.ranks)
        step.new_requests.append(new_request_data(request, block_ids))
        step.add(request, num_new, samples=num_new == num_missing)
        return num_new

    def _fail_too_large(self, kv_cache: KVCacheManager, request: Request) -> EngineCoreOutput:
        return self.lifecycle.fail(
            request,
            f"The request has {request.num_tokens} tokens now; {kv_cache.describe()} is too small for "
            "more, though no other request is in it. Lower max_tokens or give the cache more memory.",
        )


def _jumps(request: Request) -> bool:
    """Whether tokens beyond its next one were appended by its grammar (or are computed again)."""
    return request.grammar is not None and request.num_computed_tokens >= request.num_prompt_tokens


def _find_hit(kv_cache: KVCacheManager, request: Request) -> PrefixHit | None:
    """The cached prefix of a waiting request; None if it must not read the cache.

    Log probabilities of prompt tokens need their logits, so those tokens are computed.
    """
    if not kv_cache.enable_prefix_caching:
        return None
    unscored = request.num_prompt_tokens - 1 - request.num_sent_logprobs
    if request.sampling_params.prompt_logprobs is not None and unscored > 0:
        return None
    return kv_cache.get_computed_blocks(request)

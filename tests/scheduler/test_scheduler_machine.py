"""Random arrivals, aborts, failures, tiny caches: each request ends with the tokens that it gets alone."""

from __future__ import annotations

import pytest
from fake_runner import full_attention_group, sliding_window_group
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_harness import Harness

from jaxserve.errors import InvalidRequestError
from jaxserve.step import BurstLimits, FinishReason

GROUPS = {
    "full": [full_attention_group()],
    "window": [sliding_window_group(5)],
    "narrow": [sliding_window_group(1)],
    "full+window": [full_attention_group(), sliding_window_group(6)],
    "windows": [sliding_window_group(9), sliding_window_group(3)],
}
MAX_MODEL_LEN = 40
BASES = [[0] * MAX_MODEL_LEN, [0, 1] * MAX_MODEL_LEN, [0, 0, 0, 0, 0, 0, 0, 1] * MAX_MODEL_LEN]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Beginnings of a few sequences, with tails: requests share prefixes often."""
    tail = draw(st.lists(st.integers(0, 1), max_size=3))
    length = draw(st.integers(1, MAX_MODEL_LEN - 1))
    return (draw(st.sampled_from(BASES))[: max(0, length - len(tail))] + tail)[:length]


class SchedulerMachine(RuleBasedStateMachine):
    """Caches of a few blocks force preemption; up to three steps are in flight."""

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        num_blocks=st.integers(2, 40),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        extra_tokens=st.integers(0, 12),
        chunked=st.booleans(),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        data_parallel_size=st.sampled_from([1, 2, 4]),
        separate_paths=st.booleans(),
        burst_steps=st.integers(1, 4),
        step_sizes=st.sampled_from([(), (2, 5, 8, 12)]),
    )
    def start(
        self,
        groups: str,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_tokens: int,
        chunked: bool,
        caching: bool,
        policy: str,
        data_parallel_size: int,
        separate_paths: bool,
        burst_steps: int,
        step_sizes: tuple[int, ...],
    ) -> None:
        bursts = None
        if 1 < burst_steps <= block_size and data_parallel_size == 1 and not separate_paths:
            bursts = BurstLimits(burst_steps, max_rows=4, max_top_k=64)
        self.harness = Harness(
            num_blocks=num_blocks * len(GROUPS[groups]),
            block_size=block_size,
            groups=GROUPS[groups],
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            scheduling_policy=policy,
            data_parallel_size=data_parallel_size,
            separate_paths=separate_paths,
            bursts=bursts,
            step_sizes=step_sizes,
        )
        self.aborted: set[str] = set()
        self.failed: set[str] = set()
        self.num_added = 0

    @rule(
        prompt=prompts(),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 3),
        stop=st.none() | st.lists(st.integers(3, 20), max_size=4),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, "a"]),
        needs_sync=st.booleans(),
        prompt_logprobs=st.none() | st.just(0),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        stop: list[int] | None,
        ignore_eos: bool,
        priority: int,
        salt: str | None,
        needs_sync: bool,
        prompt_logprobs: int | None,
    ) -> None:
        request_id = f"r{self.num_added}"
        self.num_added += 1
        try:
            self.harness.add(
                request_id,
                prompt,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                stop_token_ids=stop,
                ignore_eos=ignore_eos,
                priority=priority,
                arrival_time=float(self.num_added),
                cache_salt=salt,
                bad_words=[[1, 2]] if needs_sync else None,
                prompt_logprobs=prompt_logprobs,
            )
        except InvalidRequestError as error:
            assert error.code == "context_length_exceeded"  # noqa: PT017

    @precondition(lambda self: len(self.harness.in_flight) < 3)
    @rule()
    def schedule(self) -> None:
        self.harness.schedule()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def read(self) -> None:
        self.harness.read()

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.harness.requests)))
        if not self.harness.requests[request_id].finished:
            self.aborted.add(request_id)
        self.harness.scheduler.abort([request_id, "unknown"])

    @precondition(lambda self: self.harness.runner.rows and len(self.harness.in_flight) < 3)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """One row of a step fails before another step is scheduled, as when it could not be dispatched."""
        failures = self.harness.runner.failures
        request_id = data.draw(st.sampled_from(sorted(self.harness.runner.rows)))
        failures[request_id] = "injected"
        if request_id in self.harness.schedule().num_scheduled_tokens:
            self.failed.add(request_id)
        failures.clear()
        while self.harness.in_flight:
            self.harness.read()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def lose_device(self) -> None:
        self.failed |= self.harness.lose_device()
        assert not self.harness.scheduler.running
        assert not any(kv.pool.cached_blocks() for kv in self.harness.scheduler.kv_caches)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.scheduler.reset_prefix_cache()

    @invariant()
    def pool_is_consistent(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check_pool()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.depth = self.num_added % 3
        self.harness.run(max_steps=100_000)
        for request_id in self.harness.requests:
            self._check_result(request_id)

    def _check_result(self, request_id: str) -> None:
        harness, result = self.harness, self.harness.results[request_id]
        request = harness.requests[request_id]
        if request_id in self.aborted:
            assert result.finish_reason is None
        elif result.finish_reason is FinishReason.ERROR:
            if request_id not in self.failed:
                assert result.error is not None
                assert "too small" in result.error
                assert not harness.scheduler.kv_caches[0].fits_alone(request.num_tokens)
        else:
            harness.check_result(request_id)
            self._check_prompt_logprobs(request_id)

    def _check_prompt_logprobs(self, request_id: str) -> None:
        request, result = self.harness.requests[request_id], self.harness.results[request_id]
        scored = [entry for output in result.outputs for entry in output.prompt_logprobs or []]
        if request.sampling_params.prompt_logprobs is None:
            assert not scored
        else:
            positions = range(1, request.num_prompt_tokens)
            assert [entry.logprobs[0] for entry in scored] == [-float(position) for position in positions]
            assert [entry.token_ids[0] for entry in scored] == request.all_token_ids[
                1 : request.num_prompt_tokens
            ]


SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))
SchedulerMachine.TestCase.settings = settings(SETTINGS, max_examples=150, stateful_step_count=60)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_scheduler_machine_longer() -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(SETTINGS, max_examples=600, stateful_step_count=100)
    )

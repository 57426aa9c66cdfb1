"""Steps scheduled before earlier ones are read: tokens in flight, late ends, preemption and abort under
way."""

from __future__ import annotations

import random

import pytest
from scheduler_harness import EOS, Harness

from jaxserve.step import FinishReason


def test_the_next_step_is_scheduled_before_the_last_is_read() -> None:
    harness = Harness()
    request = harness.add("a", [1] * 5, max_tokens=4, ignore_eos=True)
    assert harness.schedule().num_scheduled_tokens == {"a": 5}
    assert harness.schedule().num_scheduled_tokens == {"a": 1}
    assert harness.schedule().num_scheduled_tokens == {"a": 1}
    assert (request.num_computed_tokens, request.num_inflight_tokens, request.num_tokens) == (7, 3, 5)
    harness.read()
    assert (request.num_computed_tokens, request.num_inflight_tokens, request.num_tokens) == (7, 2, 6)
    harness.run()
    harness.check_result("a")


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_nothing_is_scheduled_beyond_max_tokens(max_tokens: int) -> None:
    harness = Harness()
    harness.add("a", [1] * 5, max_tokens=max_tokens, ignore_eos=True)
    steps = [harness.schedule().num_scheduled_tokens for _ in range(5)]
    assert steps == [{"a": 5}, {"a": 1}, {"a": 1}][:max_tokens] + [{}] * (5 - max_tokens)
    harness.run()
    harness.check_result("a")


def test_nothing_is_scheduled_beyond_the_context_length() -> None:
    harness = Harness(max_model_len=8)
    harness.add("a", [1] * 6, max_tokens=None, ignore_eos=True)
    assert [len(harness.schedule().num_scheduled_tokens) for _ in range(4)] == [1, 1, 0, 0]
    harness.run()
    harness.check_result("a")


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_sampled_after_the_end_is_dropped(depth: int) -> None:
    harness = Harness(depth=depth)
    harness.runner.sampler = lambda row, _: [7, EOS, 8, 9][len(row.token_ids) - row.num_prompt_tokens]
    harness.add("a", [1] * 5, max_tokens=9)
    harness.run()
    assert harness.runner.num_steps == 2 + depth
    assert harness.results["a"].token_ids == [7, EOS]
    assert harness.results["a"].finish_reason is FinishReason.STOP


def test_blocks_of_a_request_that_ended_are_handed_on_while_its_last_step_is_in_flight() -> None:
    harness = Harness(num_blocks=3)
    harness.runner.sampler = lambda row, _: EOS if row.request_id == "a" else 5
    harness.add("a", [1] * 9, max_tokens=9)
    harness.schedule()
    harness.schedule()
    harness.read()
    assert len(harness.in_flight) == 1
    harness.add("b", [2] * 11, max_tokens=2)
    step = harness.schedule()
    assert step.finished_request_ids == ["a"]
    assert step.num_scheduled_tokens == {"b": 11}
    harness.run()
    assert harness.results["b"].token_ids == [5, 5]


def preempt_under_way() -> Harness:
    """``b`` is preempted while two of its tokens are in flight; then ``a`` is aborted, so that blocks are
    free."""
    harness = Harness(num_blocks=4, max_num_batched_tokens=64, max_num_seqs=2)
    harness.add("a", [1] * 4, max_tokens=20, ignore_eos=True)
    harness.add("b", [2] * 5, max_tokens=9, ignore_eos=True)
    harness.schedule()
    while not harness.schedule().preempted_request_ids:
        if len(harness.in_flight) > 2:
            harness.read()
    assert harness.requests["b"].num_inflight_tokens == 2
    harness.scheduler.abort(["a"])
    return harness


def test_a_preempted_request_waits_for_its_tokens_and_keeps_them() -> None:
    harness = preempt_under_way()
    request = harness.requests["b"]
    known = request.num_tokens
    assert not harness.schedule().num_scheduled_tokens
    harness.read()
    assert (request.num_tokens, request.num_inflight_tokens) == (known + 1, 1)
    assert not harness.schedule().num_scheduled_tokens
    harness.run()
    harness.check_result("b")
    assert request.num_preemptions == 1


def test_a_preempted_request_can_end_with_a_token_in_flight() -> None:
    harness = preempt_under_way()
    request = harness.requests["b"]
    request.stop_token_ids = frozenset(range(50))
    harness.read()
    assert request.finish_reason is FinishReason.STOP
    harness.run()
    assert harness.scheduler.stats().num_waiting == 0


def test_a_preempted_request_can_be_aborted_with_a_token_in_flight() -> None:
    harness = preempt_under_way()
    harness.scheduler.abort(["b"])
    tokens = list(harness.results["b"].token_ids)
    harness.run()
    assert harness.results["b"].token_ids == tokens


def test_requests_that_need_the_host_skip_steps_and_the_others_do_not() -> None:
    harness = Harness(depth=1)
    harness.add("host", [1] * 4, max_tokens=5, ignore_eos=True, bad_words=[[3, 4]])
    harness.add("free", [2] * 4, max_tokens=9, ignore_eos=True)
    rows = [set(harness.step().num_scheduled_tokens) for _ in range(9)]
    assert rows == [{"host", "free"}, {"free"}] * 4 + [{"host", "free"}]
    harness.run()
    for request_id in harness.requests:
        harness.check_result(request_id)


def test_in_flight_tokens_are_cached_only_when_they_are_read() -> None:
    harness = Harness(block_size=4)
    harness.add("a", [1] * 3, max_tokens=9, ignore_eos=True)
    harness.schedule()
    harness.schedule()
    harness.schedule()  # block 0 is computed, but its last token is not read
    assert len(harness.scheduler.kv_caches[0].pool.cached_blocks()) == 0
    harness.read()
    assert len(harness.scheduler.kv_caches[0].pool.cached_blocks()) == 1
    harness.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_depth_changes_no_token(depth: int, caching: bool, policy: str) -> None:
    """A few hundred mixed requests through a small cache."""
    random_ = random.Random(depth)
    harness = Harness(
        num_blocks=60,
        depth=depth,
        max_num_seqs=12,
        max_num_batched_tokens=40,
        enable_prefix_caching=caching,
        scheduling_policy=policy,
    )
    for i in range(200):
        harness.add(
            str(i),
            [random_.randrange(3)] * random_.randint(1, 60),
            max_tokens=random_.randint(1, 40),
            priority=random_.randrange(3),
            bad_words=[[1, 2]] if i % 7 == 0 else None,
        )
        harness.step()
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    for request_id in harness.requests:
        harness.check_result(request_id)

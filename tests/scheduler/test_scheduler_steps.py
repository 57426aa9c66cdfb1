"""What a step holds: budget, order, chunks, prefix hits, priority, preemption."""

from __future__ import annotations

import pytest
from fake_runner import full_attention_group, sliding_window_group
from scheduler_harness import Harness

from jaxserve.step import SchedulerOutput


def scheduled(harness: Harness, steps: int) -> list[dict[str, int]]:
    return [harness.step().num_scheduled_tokens for _ in range(steps)]


# --- the budget ---------------------------------------------------------------------------------------------


def test_a_long_prompt_is_split_and_decoding_goes_on_beside_it() -> None:
    harness = Harness(max_num_seqs=4, max_num_batched_tokens=10)
    harness.add("short", [1] * 3, max_tokens=20, ignore_eos=True)
    harness.add("long", [2] * 20, max_tokens=20, ignore_eos=True)
    assert scheduled(harness, 4) == [
        {"short": 3, "long": 7},
        {"short": 1, "long": 9},
        {"short": 1, "long": 4},
        {"short": 1, "long": 1},
    ]
    harness.run()
    harness.check_result("long")


def test_an_older_long_prompt_does_not_stop_younger_requests() -> None:
    harness = Harness(max_num_seqs=4, max_num_batched_tokens=8, scheduling_policy="priority")
    harness.add("young", [1] * 4, max_tokens=20, ignore_eos=True, priority=1)
    harness.step()
    harness.add("urgent", [2] * 40, max_tokens=1, priority=0)
    for step in scheduled(harness, 5):
        assert step["young"] == 1
        assert step["urgent"] == 7
    assert list(harness.step().num_scheduled_tokens.items()) == [("young", 1), ("urgent", 5)]


def test_every_running_request_advances_whatever_the_budget() -> None:
    """Budget and rows are equal: chunks of one token, and still everyone ends."""
    harness = Harness(max_num_seqs=3, max_num_batched_tokens=3)
    for i in range(6):
        harness.add(str(i), [i] * 7, max_tokens=5)
    steps = harness.run()
    assert max(step.total_num_scheduled_tokens for step in steps) == 3
    for request_id in harness.requests:
        harness.check_result(request_id)


def test_rows_that_sample_one_token_come_first() -> None:
    harness = Harness(max_num_batched_tokens=20)
    harness.add("a", [1] * 17, max_tokens=9, ignore_eos=True)
    harness.add("b", [2] * 9, max_tokens=9, ignore_eos=True)
    first = harness.step()
    assert list(first.num_scheduled_tokens.items()) == [("a", 17), ("b", 3)]
    assert (first.num_decode_rows, first.samples) == (0, {"a"})
    harness.add("one token", [3], max_tokens=9, ignore_eos=True)
    second = harness.step()
    assert list(second.num_scheduled_tokens.items()) == [("a", 1), ("one token", 1), ("b", 6)]
    assert (second.num_decode_rows, second.samples) == (2, {"a", "b", "one token"})


def test_a_chunk_of_one_token_is_no_decoding_row() -> None:
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=2)
    harness.add("a", [1] * 2, max_tokens=5, ignore_eos=True)
    harness.add("b", [2] * 5, max_tokens=5, ignore_eos=True)
    harness.step()
    step = harness.step()
    assert step.num_scheduled_tokens == {"a": 1, "b": 1}
    assert (step.num_decode_rows, step.samples) == (1, {"a"})


def test_rows_are_limited() -> None:
    harness = Harness(max_num_seqs=2)
    for i in range(5):
        harness.add(str(i), [i], max_tokens=2 + i, ignore_eos=True)
    names = ["".join(step.num_scheduled_tokens) for step in harness.run()]
    assert names[:3] == ["01", "01", "12"]


def test_only_rows_with_new_blocks_are_listed() -> None:
    harness = Harness(block_size=4)
    harness.add("a", [1] * 3, max_tokens=12, ignore_eos=True)
    listed = [bool(harness.step().cached_requests) for _ in range(12)]
    assert listed == [False, False, True, False, False, False, True, False, False, False, True, False]


def test_without_chunks_prompts_are_whole_and_in_order() -> None:
    harness = Harness(max_num_batched_tokens=10, max_num_seqs=4, enable_chunked_prefill=False)
    for name, length in [("a", 6), ("b", 7), ("c", 2)]:
        harness.add(name, [ord(name)] * length, max_tokens=4, ignore_eos=True)
    assert scheduled(harness, 3) == [{"a": 6}, {"a": 1, "b": 7, "c": 2}, {"a": 1, "b": 1, "c": 1}]


def test_without_chunks_a_resumed_request_longer_than_a_step_is_split() -> None:
    harness = Harness(
        num_blocks=8,
        max_num_batched_tokens=12,
        max_num_seqs=2,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
    for name in "ab":
        harness.add(name, [ord(name)] * 8, max_tokens=20, ignore_eos=True)
    steps = harness.run()
    assert harness.scheduler.stats().num_preemptions == 1
    resumed = [step.num_scheduled_tokens["b"] for step in steps if "b" in step.num_scheduled_tokens]
    assert max(resumed[1:]) == 12
    for name in "ab":
        harness.check_result(name)


# --- the prefix cache ---------------------------------------------------------------------------------------


def test_a_prompt_seen_before_starts_after_its_full_blocks() -> None:
    harness = Harness()
    harness.add("a", [1] * 12, max_tokens=1)
    harness.run()
    harness.add("b", [1] * 12, max_tokens=1)
    step = harness.step()
    assert step.num_scheduled_tokens == {"b": 4}
    assert step.new_requests[0].num_computed_tokens == 8
    assert harness.requests["b"].num_cached_tokens == 8


def test_output_is_cached_for_the_next_turn() -> None:
    harness = Harness()
    first = harness.add("a", [1] * 6, max_tokens=10, ignore_eos=True)
    harness.run()
    harness.add("b", [*first.all_token_ids, 5, 5], max_tokens=2)
    harness.run()
    assert harness.requests["b"].num_cached_tokens == 12  # 16 tokens, of which the last was never computed
    harness.check_result("b")


def test_completions_of_one_prompt_compute_it_once() -> None:
    harness = Harness(max_num_batched_tokens=64)
    for i in range(4):
        harness.add(str(i), [1] * 30, max_tokens=3, ignore_eos=True)
    harness.add("other", [2] * 30, max_tokens=3, ignore_eos=True)
    first, second = harness.step(), harness.step()
    assert first.num_scheduled_tokens == {"0": 30, "other": 30}
    assert second.num_scheduled_tokens == {"0": 1, "other": 1, "1": 2, "2": 2, "3": 2}
    harness.run()
    for request_id in harness.requests:
        harness.check_result(request_id)


def test_completions_follow_a_prompt_that_takes_several_steps() -> None:
    harness = Harness(max_num_batched_tokens=16, max_num_seqs=4)
    for i in range(3):
        harness.add(str(i), [1] * 42, max_tokens=2, ignore_eos=True)
    steps = harness.run()
    computed = sum(step.total_num_scheduled_tokens for step in steps)
    assert computed == 42 + 2 + 2 + 3  # the others compute what is left after 10 blocks of 4
    assert harness.scheduler.stats().prefix_cache_hits == 80


def test_requests_with_other_salts_do_not_wait_for_each_other() -> None:
    harness = Harness(max_num_batched_tokens=64)
    for salt in ["x", "y", None]:
        harness.add(str(salt), [1] * 12, cache_salt=salt)
    assert harness.step().num_scheduled_tokens == {"x": 12, "y": 12, "None": 12}
    harness.run()
    harness.add("again", [1] * 12, cache_salt="y")
    harness.add("unknown", [1] * 12, cache_salt="z")
    harness.run()
    assert harness.requests["again"].num_cached_tokens == 8
    assert harness.requests["unknown"].num_cached_tokens == 0


def test_without_caching_equal_prompts_are_computed_side_by_side() -> None:
    harness = Harness(max_num_batched_tokens=64, enable_prefix_caching=False)
    for i in range(2):
        harness.add(str(i), [1] * 12)
    assert harness.step().num_scheduled_tokens == {"0": 12, "1": 12}
    harness.run()
    assert harness.scheduler.stats().prefix_cache_queries == 0


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it() -> None:
    harness = Harness()
    harness.add("a", [1] * 12, max_tokens=1, prompt_logprobs=1)
    harness.run()
    harness.add("b", [1] * 12, max_tokens=1, prompt_logprobs=1)
    assert harness.step().num_scheduled_tokens == {"b": 12}
    harness.run()
    assert harness.requests["b"].num_cached_tokens == 0
    assert harness.scheduler.stats().prefix_cache_queries == 0
    harness.add("c", [1] * 12, max_tokens=1)
    harness.run()
    assert harness.requests["c"].num_cached_tokens == 8


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prompt_logprobs_of_chunks_and_after_preemption_come_once(depth: int) -> None:
    harness = Harness(num_blocks=12, max_num_batched_tokens=10, max_num_seqs=3, depth=depth)
    for name in "abc":
        harness.add(name, [ord(name)] * 14, max_tokens=25, ignore_eos=True, prompt_logprobs=2)
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    for name in "abc":
        harness.check_result(name)
        scored = [entry for output in harness.results[name].outputs for entry in output.prompt_logprobs or []]
        assert [entry.logprobs[0] for entry in scored] == [-float(position) for position in range(1, 14)]


def test_reset_prefix_cache() -> None:
    harness = Harness()
    harness.add("a", [1] * 12, max_tokens=20, ignore_eos=True)
    harness.step()
    harness.scheduler.reset_prefix_cache()
    harness.add("b", [1] * 12, max_tokens=1)
    harness.run()
    assert harness.requests["b"].num_cached_tokens == 0
    harness.add("c", [1] * 12, max_tokens=1)
    harness.run()
    assert harness.requests["c"].num_cached_tokens == 8


# --- order and preemption -----------------------------------------------------------------------------------


def test_fcfs_ignores_priority() -> None:
    harness = Harness(max_num_seqs=1)
    for i, priority in enumerate([3, 1, 2]):
        harness.add(str(i), [i], max_tokens=1, priority=priority)
    assert [list(step.num_scheduled_tokens) for step in harness.run()] == [["0"], ["1"], ["2"]]


def test_priority_then_arrival() -> None:
    harness = Harness(max_num_seqs=1, scheduling_policy="priority")
    for i, (priority, arrival) in enumerate([(3, 0.0), (1, 5.0), (1, 4.0), (-1, 9.0)]):
        harness.add(str(i), [i], max_tokens=1, priority=priority, arrival_time=arrival)
    assert [list(step.num_scheduled_tokens) for step in harness.run()] == [["3"], ["2"], ["1"], ["0"]]


def first_preemption(harness: Harness) -> SchedulerOutput:
    while not (step := harness.step()).preempted_request_ids:
        pass
    return step


def test_fcfs_preempts_the_latest() -> None:
    harness = Harness(num_blocks=9, max_num_batched_tokens=64)
    for name in "abc":
        harness.add(name, [ord(name)] * 7, max_tokens=16, ignore_eos=True)
    step = first_preemption(harness)
    assert step.preempted_request_ids == ["c"]
    assert step.new_requests == []
    harness.run()
    for name in "abc":
        harness.check_result(name)


def test_the_lowest_priority_is_preempted_and_the_highest_never() -> None:
    harness = Harness(num_blocks=9, max_num_batched_tokens=64, scheduling_policy="priority")
    for name, priority in [("a", 2), ("b", 0), ("c", 1)]:
        harness.add(name, [ord(name)] * 7, max_tokens=16, ignore_eos=True, priority=priority)
    assert first_preemption(harness).preempted_request_ids == ["a"]
    harness.run()
    assert harness.requests["b"].num_preemptions == 0
    for name in "abc":
        harness.check_result(name)


def test_a_preempted_request_resumes_from_the_prefix_cache_ahead_of_later_ones() -> None:
    harness = Harness(num_blocks=10, max_num_batched_tokens=64, max_num_seqs=2)
    harness.add("a", [1] * 8, max_tokens=17, ignore_eos=True)
    harness.add("b", [2] * 8, max_tokens=20, ignore_eos=True)
    harness.add("c", [3] * 8, max_tokens=1)
    first_preemption(harness)
    steps = harness.run()
    new = [data for step in steps for data in step.new_requests]
    assert [data.request_id for data in new] == ["b", "c"]
    resumed = new[0]
    assert resumed.num_prompt_tokens == 8
    assert len(resumed.token_ids) > 16
    assert resumed.num_computed_tokens >= 8
    assert harness.results["b"].outputs[-1].num_preemptions == 1
    assert harness.requests["b"].num_cached_tokens == 0  # of its first start
    for name in "abc":
        harness.check_result(name)


def test_nobody_enters_in_a_step_that_preempted() -> None:
    harness = Harness(num_blocks=12, max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(12):
        harness.add(str(i), [i] * 9, max_tokens=14, ignore_eos=True)
    steps = harness.run()
    preempting = [step for step in steps if step.preempted_request_ids]
    assert preempting
    assert not any(step.new_requests for step in preempting)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
def test_no_thrash(policy: str, caching: bool) -> None:
    """A cache that holds about four of thirty requests: far fewer preemptions than steps, everyone ends."""
    harness = Harness(
        num_blocks=40,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        scheduling_policy=policy,
        enable_prefix_caching=caching,
    )
    for i in range(30):
        harness.add(str(i), [i] * 16, max_tokens=24, ignore_eos=True, priority=i % 3)
    steps = harness.run()
    assert max(request.num_preemptions for request in harness.requests.values()) <= 3
    assert harness.scheduler.stats().num_preemptions <= 30
    needed = 30 * (16 + 23)
    assert sum(step.total_num_scheduled_tokens for step in steps) < 1.6 * needed


def test_a_large_request_is_not_passed_for_ever() -> None:
    """Small requests keep coming; the large one at the head of the queue still gets its turn."""
    harness = Harness(num_blocks=12, max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(3):
        harness.add(f"early {i}", [i] * 8, max_tokens=6, ignore_eos=True)
    harness.step()
    harness.add("large", [9] * 36, max_tokens=4, ignore_eos=True)
    for i in range(40):
        harness.add(f"late {i}", [i] * 8, max_tokens=6, ignore_eos=True)
    order = [data.request_id for step in harness.run() for data in step.new_requests]
    assert order[0] == "large"
    harness.check_result("large")


@pytest.mark.parametrize(
    "groups",
    [
        [sliding_window_group(6)],
        [full_attention_group(), sliding_window_group(6)],
        [sliding_window_group(16), sliding_window_group(3)],
    ],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_sliding_windows(groups: list, depth: int) -> None:
    harness = Harness(num_blocks=30, groups=groups, depth=depth, max_num_batched_tokens=16, max_num_seqs=4)
    for i in range(8):
        harness.add(str(i), [i % 3] * (10 + i), max_tokens=20, ignore_eos=True)
    harness.run()
    assert harness.scheduler.stats().prefix_cache_hits > 0
    for request_id in harness.requests:
        harness.check_result(request_id)


def test_a_window_keeps_few_blocks() -> None:
    harness = Harness(num_blocks=30, groups=[sliding_window_group(6)], max_num_batched_tokens=16)
    harness.add("a", [1] * 40, max_tokens=40, ignore_eos=True)
    used: list[int] = []
    while harness.scheduler.has_work():
        harness.step()
        used.append(30 - harness.scheduler.stats().num_free_blocks)
    assert max(used) <= 7  # 5 tokens before a chunk of 16
    assert max(used[5:]) <= 4  # 6 tokens, unaligned; freed when the next block is needed
    harness.check_result("a")

"""The FakeRunner refuses what it should: without this, tests against it prove nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from fake_runner import FakeRunner
from scheduler_harness import Harness

from jaxserve.step import ModelRunner, SchedulerOutput


def _runner_is_a_model_runner(runner: FakeRunner) -> ModelRunner:
    return runner


def harness_before_a_step() -> tuple[Harness, SchedulerOutput]:
    """``a`` and ``b`` share a cached block and decode; ``c`` enters; ``old`` leaves."""
    harness = Harness(block_size=4, max_num_seqs=4)
    harness.add("old", [1] * 6, max_tokens=3, ignore_eos=True)
    harness.step()
    harness.add("a", [1] * 7, max_tokens=20, ignore_eos=True)
    harness.add("b", [1] * 7, max_tokens=20, ignore_eos=True)
    harness.step()
    harness.step()
    harness.add("c", [3] * 5, max_tokens=20, ignore_eos=True)
    return harness, harness.scheduler.schedule(0.0)


def test_the_scenario_is_right_as_it_is() -> None:
    harness, step = harness_before_a_step()
    assert list(step.num_scheduled_tokens.items()) == [("a", 1), ("b", 1), ("c", 5)]
    assert [data.request_id for data in step.cached_requests] == ["a", "b"]
    assert step.finished_request_ids == ["old"]
    assert harness.runner.rows["a"].block_tables[0][0] == harness.runner.rows["b"].block_tables[0][0]
    assert set(harness.runner.execute(step).result().sampled_token_ids) == {"a", "b", "c"}


def _reorder(step: SchedulerOutput) -> None:
    step.num_scheduled_tokens = dict(reversed(step.num_scheduled_tokens.items()))


def _same_block(step: SchedulerOutput) -> None:
    step.cached_requests[0].new_block_ids = copy.deepcopy(step.cached_requests[1].new_block_ids)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda step: step.finished_request_ids.append("c"),
        lambda step: step.finished_request_ids.extend(["a", "a"]),
        lambda step: step.preempted_request_ids.append("nobody"),
        lambda step: step.new_requests.append(step.new_requests[0]),
        lambda step: step.new_requests.clear(),
        lambda step: step.num_scheduled_tokens.pop("c"),
        lambda step: step.num_scheduled_tokens.update(c=4),
        lambda step: step.num_scheduled_tokens.update(c=6),
        lambda step: step.num_scheduled_tokens.update(a=2),
        lambda step: step.num_scheduled_tokens.update(a=0),
        lambda step: step.samples.discard("a"),
        lambda step: setattr(step, "num_decode_rows", 1),
        lambda step: setattr(step, "num_decode_rows", 3),
        _reorder,
        _same_block,
        lambda step: setattr(step.cached_requests[0], "new_block_ids", [[0]]),
        lambda step: setattr(step.cached_requests[0], "new_block_ids", [[1]]),
        lambda step: setattr(step.cached_requests[0], "new_block_ids", [[10_000]]),
        lambda step: setattr(step.cached_requests[0], "new_block_ids", [[]]),
        lambda step: setattr(step.cached_requests[0], "num_computed_tokens", 3),
        lambda step: step.cached_requests.pop(),
        lambda step: setattr(step.new_requests[0], "num_computed_tokens", 4),
        lambda step: step.num_scheduled_tokens.clear(),
    ],
)
def test_spoilt_steps_are_refused(spoil: Callable[[SchedulerOutput], object]) -> None:
    harness, step = harness_before_a_step()
    spoil(step)
    with pytest.raises((AssertionError, KeyError)):
        harness.runner.execute(step)


def harness_of_two_ranks() -> tuple[Harness, SchedulerOutput]:
    """``a`` decodes on rank 0 and ``b`` on rank 1; ``c`` enters on rank 0 and ``d`` on rank 1."""
    harness = Harness(block_size=4, max_num_seqs=2, max_num_batched_tokens=8, data_parallel_size=2)
    for names in ("ab", "cd"):
        for name in names:
            harness.add(name, [3 + ord(name) % 7] * 5, max_tokens=20, ignore_eos=True)
        step = harness.scheduler.schedule(0.0)
        if names == "ab":
            harness.scheduler.update_from_output(step, harness.runner.execute(step).result())
    return harness, step


def test_two_ranks_are_right_as_they_are() -> None:
    harness, step = harness_of_two_ranks()
    assert list(step.num_scheduled_tokens.items()) == [("a", 1), ("b", 1), ("c", 5), ("d", 5)]
    assert step.num_decode_rows_by_rank == (1, 1)
    assert step.new_requests[0].block_ids == step.new_requests[1].block_ids, "ids are the rank's own"
    assert set(harness.runner.execute(step).result().sampled_token_ids) == set("abcd")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda step: setattr(step, "num_decode_rows_by_rank", (2, 0)), "num_decode_rows_by_rank"),
        (lambda step: setattr(step, "num_decode_rows_by_rank", ()), "num_decode_rows_by_rank"),
        (lambda step: setattr(step.new_requests[0], "data_rank", 2), "no such rank"),
        (lambda step: setattr(step.new_requests[0], "data_rank", 1), "over the token budget"),
        (
            lambda step: setattr(step, "num_scheduled_tokens", {"a": 1, "b": 1, "d": 5, "c": 5}),
            "order of ranks",
        ),
        (lambda step: setattr(step.new_requests[1], "block_ids", [[1, 3]]), r"block 1: \['b', 'd'\]"),
    ],
)
def test_spoilt_ranks_are_refused(spoil: Callable[[SchedulerOutput], object], message: str) -> None:
    harness, step = harness_of_two_ranks()
    spoil(step)
    with pytest.raises(AssertionError, match=message):
        harness.runner.execute(step)


def test_another_sequence_in_the_cache_is_noticed() -> None:
    harness, step = harness_before_a_step()
    block = harness.runner.rows["a"].block_tables[0][0]
    harness.runner.caches[0][block][2] = (0, 12345)
    with pytest.raises(AssertionError, match="a: another sequence at position 2"):
        harness.runner.execute(step)


def test_writing_to_a_shared_block_is_noticed() -> None:
    harness, step = harness_before_a_step()
    rows = harness.runner.rows
    rows["b"].block_tables[0] = rows["a"].block_tables[0] + step.cached_requests[0].new_block_ids[0]
    step.cached_requests.pop()
    with pytest.raises(AssertionError, match=r"block \d+: \['a', 'b'\]"):
        harness.runner.execute(step)


def test_steps_are_read_once_and_in_order() -> None:
    harness = Harness()
    harness.add("a", [1] * 5, max_tokens=5, ignore_eos=True)
    first = harness.runner.execute(harness.scheduler.schedule(0.0))
    second = harness.runner.execute(harness.scheduler.schedule(0.0))
    with pytest.raises(AssertionError, match="in order"):
        second.result()
    first.result()
    with pytest.raises(AssertionError, match="in order"):
        first.result()
    second.result()


def test_limits_are_checked() -> None:
    harness, step = harness_before_a_step()
    harness.runner.max_num_seqs = 2
    with pytest.raises(AssertionError, match="too many rows"):
        harness.runner.execute(step)
    harness, step = harness_before_a_step()
    harness.runner.max_num_batched_tokens = 6
    with pytest.raises(AssertionError, match="token budget"):
        harness.runner.execute(step)

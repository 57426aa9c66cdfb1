"""Bursts: who takes part, when there is one, and that tokens are those of single steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_harness import EOS, Harness, make_request

from jaxserve.scheduler.bursts import Bursts, Draw
from jaxserve.step import BurstLimits, SchedulerOutput

LIMITS = BurstLimits(num_steps=4, max_rows=4, max_top_k=64)


def harness(**options: object) -> Harness:
    return Harness(**{"bursts": LIMITS, "block_size": 4, "depth": 1, **options})


def steps_of(run: list[SchedulerOutput]) -> list[int]:
    """Decode steps of each dispatch that had tokens."""
    return [step.num_decode_steps for step in run if step.num_scheduled_tokens]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, Draw.GREEDY),
        ({"temperature": 1.0}, Draw.RANDOM),
        ({"temperature": 1.0, "min_p": 0.1}, Draw.RANDOM),
        ({"temperature": 1.0, "top_k": 1}, Draw.GREEDY),
        ({"temperature": 1.0, "top_k": 64, "top_p": 0.5}, Draw.TOP_K),
        ({"temperature": 1.0, "top_k": 65}, Draw.OTHER),
        ({"temperature": 1.0, "top_p": 0.5}, Draw.OTHER),
        ({"stop_token_ids": [7], "stop": ["x"]}, Draw.GREEDY),
        ({"min_tokens": 1}, Draw.OTHER),
        ({"logprobs": 0}, Draw.OTHER),
        ({"prompt_logprobs": 1}, Draw.OTHER),
        ({"presence_penalty": 0.5}, Draw.OTHER),
        ({"logit_bias": {3: 1.0}}, Draw.OTHER),
        ({"allowed_token_ids": [3, 4]}, Draw.OTHER),
        ({"bad_words": [[1]]}, Draw.OTHER),
        ({"bad_words": [[1, 2]]}, Draw.OTHER),
    ],
)
def test_who_takes_part(params: dict[str, object], expected: Draw) -> None:
    assert Bursts(LIMITS).draw_of(make_request("a", [1], **params)) == expected


def test_rows_leave_a_burst_with_their_last_token() -> None:
    """Prompts' first tokens come from the first step; then 9, 4 and 2 are left."""
    h = harness()
    for name, max_tokens in (("a", 3), ("b", 10), ("c", 5)):
        h.add(name, [1, 2, 3], max_tokens=max_tokens, ignore_eos=True)
    run = h.run()
    scheduled = [step.num_scheduled_tokens for step in run if step.num_scheduled_tokens]
    assert scheduled[1] == {"b": 4, "c": 4, "a": 2}
    assert scheduled[2] == {"b": 4}
    assert scheduled[3] == {"b": 1}
    assert steps_of(run) == [1, 4, 4, 1]
    for name in "abc":
        h.check_result(name)


def test_no_burst_while_one_waits_or_does_not_fit() -> None:
    h = harness(max_num_seqs=2)
    for name in "abc":
        h.add(name, [1, 2, 3], max_tokens=9, ignore_eos=True)
    assert [h.step().num_decode_steps for _ in range(4)] == [1, 1, 1, 1]  # "c" waits
    assert 4 in steps_of(h.run())

    for name, params in (("d", {}), ("e", {"logprobs": 0})):
        h.add(name, [1, 2, 3], max_tokens=9, ignore_eos=True, **params)
    assert set(steps_of(h.run())) == {1}

    h = harness(max_num_seqs=5)
    for index in range(5):
        h.add(str(index), [1, 2, 3], max_tokens=9, ignore_eos=True)
    assert set(steps_of(h.run())) == {1}, "more rows than a burst takes"

    h = harness(num_blocks=1, block_size=16)
    h.add("alone", [1, 2, 3], max_tokens=12, ignore_eos=True)
    assert 4 not in steps_of(h.run()), "no block is free to grow into"
    h.check_result("alone")


def test_two_ways_to_draw_share_no_burst() -> None:
    bursts, h = Bursts(LIMITS), harness()
    h.add("greedy", [1, 2, 3], max_tokens=20, ignore_eos=True)
    h.add("top k", [1, 2, 3], max_tokens=20, ignore_eos=True, temperature=1.0, top_k=5)
    h.step()
    assert h.step().num_decode_steps == 4
    h.add("all", [1, 2, 3], max_tokens=20, ignore_eos=True, temperature=1.0)
    assert [h.step().num_decode_steps for _ in range(2)] == [1, 1]
    (rank,) = h.scheduler._lifecycle.ranks
    assert bursts.num_steps(rank) == 1
    h.run()


def test_what_follows_the_end_is_dropped() -> None:
    """The request ends with a stop token in the middle of a burst; another burst is in flight then."""
    h = harness(depth=2)
    whole = h.add("whole", [1, 2, 3], max_tokens=30, ignore_eos=True)
    h.run()
    output = whole.all_token_ids[3:]
    stop = next(token for token in output if output.index(token) % 4 == 2)  # 1 of a step, then bursts of 4
    request = h.add("stops", [1, 2, 3], max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    h.run()
    assert request.all_token_ids[3:] == output[: output.index(stop) + 1]
    assert h.results["stops"].stop_reason == stop
    h.check_result("stops")


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 25), st.booleans()), min_size=1, max_size=6
    ),
    num_steps=st.integers(2, 4),
    depth=st.integers(0, 2),
    num_blocks=st.integers(12, 60),
)
def test_tokens_are_those_of_single_steps(
    requests: list[tuple[int, int, bool]], num_steps: int, depth: int, num_blocks: int
) -> None:
    h = harness(bursts=BurstLimits(num_steps, 6, 64), depth=depth, num_blocks=num_blocks)
    for index, (length, max_tokens, ignore_eos) in enumerate(requests):
        h.add(f"{index}", [index, EOS, *range(length)], max_tokens=max_tokens, ignore_eos=ignore_eos)
        h.step()
    h.run()
    for index in range(len(requests)):
        h.check_result(f"{index}")

"""Data parallel ranks: where requests start, what each rank may hold, and that ranks do not wait for each other."""

from __future__ import annotations

import random

import pytest
from scheduler_harness import Harness

from jaxserve.errors import InvalidRequestError
from jaxserve.scheduler.ranks import COMPUTE_WEIGHT
from jaxserve.step import SchedulerOutput

BLOCK = 4


def make_harness(data_parallel_size: int = 2, **arguments) -> Harness:
    return Harness(block_size=BLOCK, data_parallel_size=data_parallel_size, **arguments)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 50) for _ in range(length)]


def starts(step: SchedulerOutput) -> dict[str, int]:
    """The rank of each request that starts in the step."""
    return {new.request_id: new.data_rank for new in step.new_requests}


def occupy(harness: Harness, rank: int, length: int, name: str = "busy") -> None:
    """One request decodes, holding ``length`` tokens of a rank's cache (rounded up to blocks)."""
    harness.scheduler._planner._first_rank = rank
    harness.add(name, prompt_of(rank + 100, length), max_tokens=900, ignore_eos=True)
    assert starts(harness.step()) == {name: rank}


def fill_cache(harness: Harness, rank: int, prompt: list[int]) -> None:
    """A prompt that was computed on ``rank`` by a request that has ended."""
    harness.scheduler._planner._first_rank = rank
    harness.add("cached", prompt, max_tokens=1)
    assert starts(harness.step()) == {"cached": rank}


# --- where requests start -----------------------------------------------------------------------------------


def test_prompts_spread_over_the_ranks():
    harness = make_harness(4, max_num_seqs=2, max_num_batched_tokens=32)
    for index in range(9):
        harness.add(f"r{index}", prompt_of(index, 16), max_tokens=3, ignore_eos=True)
    step = harness.step()
    assert starts(step) == {f"r{index}": index % 4 for index in range(8)}, "r8 has no row"
    assert list(step.num_scheduled_tokens) == ["r0", "r4", "r1", "r5", "r2", "r6", "r3", "r7"]
    assert harness.step().num_decode_rows_by_rank == (2, 2, 2, 2)
    harness.run()
    for index in range(9):
        harness.check_result(f"r{index}")


def test_two_prompts_spread_though_one_rank_holds_more():
    """Else one rank would compute both while the other one decodes, padded to the same size."""
    harness = make_harness(max_num_batched_tokens=128)
    occupy(harness, 1, 99)
    harness.add("first", prompt_of(1, 40))
    harness.add("second", prompt_of(2, 40))
    assert starts(harness.step()) == {"first": 0, "second": 1}


def test_nobody_waits_long_for_a_short_prefix():
    """The first blocks are being computed on rank 0, but much else after them."""
    harness = make_harness(max_num_batched_tokens=32)
    long = prompt_of(0, 190)
    harness.add("long", long)
    harness.add("short", [*long[:12], 3, 3, 3, 3])
    assert starts(harness.step()) == {"long": 0, "short": 1}


def test_an_idle_engine_takes_turns():
    harness = make_harness(4)
    ranks = []
    for index in range(6):
        harness.add(f"r{index}", prompt_of(index, 9), max_tokens=2)
        ranks += starts(harness.step()).values()
        harness.run()
    assert ranks == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("held", "rank"), [(24, 1), (32, 0)])
def test_a_cached_prefix_draws_until_its_rank_is_clearly_more_loaded(held, rank):
    """On rank 1 there are 2 tokens to compute beside a row of 1, on rank 0 all 10: 7 more than there."""
    assert held < 7 * COMPUTE_WEIGHT or rank == 0
    harness = make_harness(num_blocks=64, max_num_batched_tokens=64)
    prompt = prompt_of(7, 10)
    fill_cache(harness, 1, prompt)
    occupy(harness, 1, held - 2)
    harness.add("new", prompt)
    assert starts(harness.step()) == {"new": rank}
    assert harness.scheduler.stats().prefix_cache_hits == (8 if rank == 1 else 0)


def test_a_conversation_returns_to_its_rank():
    """Also what was generated is found there, and there alone."""
    harness = make_harness(4)
    for index in (3, 1):
        harness.scheduler._planner._first_rank = index
        harness.add(f"r{index}", prompt_of(index, 10), max_tokens=11, ignore_eos=True)
        assert starts(harness.step()) == {f"r{index}": index}
    harness.run()
    for index in (3, 1):
        harness.scheduler._planner._first_rank = 0
        harness.add(f"next{index}", [*harness.requests[f"r{index}"].all_token_ids, 3, 4], ignore_eos=True)
        assert starts(harness.step()) == {f"next{index}": index}
    assert harness.scheduler.stats().prefix_cache_hits == 2 * 20
    harness.run()
    harness.check_result("next3")
    harness.check_result("next1")


def test_choices_of_one_prompt_share_its_blocks():
    """Also those that arrive with the first, and while its prompt is computed in chunks."""
    harness = make_harness(4, max_num_batched_tokens=16, num_blocks=32)
    prompt = prompt_of(1, 41)
    for index in range(6):
        harness.add(f"c{index}", prompt, max_tokens=4, ignore_eos=True)
    steps = harness.run()
    assert len({rank for step in steps for rank in starts(step).values()}) == 1
    num_tokens = sum(step.total_num_scheduled_tokens for step in steps)
    assert num_tokens == 41 + 5 * 1 + 6 * 3, "the prompt is computed once"
    assert harness.scheduler.stats().prefix_cache_hits == 5 * 40


def test_salts_and_prompt_logprobs_read_no_cache_of_any_rank():
    harness = make_harness(4)
    prompt = prompt_of(2, 20)
    for index in range(4):
        fill = f"fill{index}"
        harness.add(fill, prompt, max_tokens=1, cache_salt="a")
    harness.run()
    hits = harness.scheduler.stats().prefix_cache_hits
    harness.add("salted", prompt, max_tokens=2, cache_salt="b")
    harness.add("scored", prompt, max_tokens=2, cache_salt="a", prompt_logprobs=0)
    harness.run()
    assert harness.scheduler.stats().prefix_cache_hits == hits
    scored = [entry for output in harness.results["scored"].outputs for entry in output.prompt_logprobs or []]
    assert [entry.token_ids[0] for entry in scored] == prompt[1:]


# --- a full rank --------------------------------------------------------------------------------------------


def test_a_full_rank_blocks_nobody_that_fits_another():
    harness = make_harness(num_blocks=8, max_num_batched_tokens=64)
    cached = prompt_of(5, 8)
    fill_cache(harness, 0, cached)
    occupy(harness, 0, 21)  # 6 of 8 blocks, one of the two others is kept free for it
    harness.add("new", [*cached, 3, 3, 3])
    assert starts(harness.step()) == {"new": 1}


def test_the_queue_waits_only_for_a_request_that_no_rank_takes():
    harness = make_harness(num_blocks=8, max_num_batched_tokens=64)
    occupy(harness, 0, 13, "busy0")
    occupy(harness, 1, 17, "busy1")
    harness.add("large", prompt_of(1, 24))
    harness.add("small", prompt_of(2, 3))
    assert starts(harness.step()) == {}, "small would fit, but is behind large"
    harness.scheduler.abort(["busy1"])
    assert starts(harness.step()) == {"large": 1, "small": 0}


def test_limits_hold_for_each_rank():
    harness = make_harness(max_num_seqs=3, max_num_batched_tokens=8, num_blocks=100)
    for index in range(12):
        harness.add(f"r{index}", prompt_of(index, 30), max_tokens=5, ignore_eos=True)
    steps = harness.run()  # the runner checks each rank
    assert max(step.total_num_scheduled_tokens for step in steps) == 16
    assert max(len(step.num_scheduled_tokens) for step in steps) == 6


def test_a_prompt_must_fit_one_rank():
    harness = make_harness(4, num_blocks=8)
    with pytest.raises(InvalidRequestError, match=r"of one data parallel rank \(8 blocks of 4 tokens\)"):
        harness.add("large", prompt_of(0, 33))
    harness.add("grows", prompt_of(0, 30), max_tokens=20, ignore_eos=True)
    harness.run()
    assert "too small" in (harness.results["grows"].error or "")


# --- preemption ---------------------------------------------------------------------------------------------


def test_preempted_requests_go_on_where_there_is_room():
    harness = make_harness(num_blocks=9, max_num_seqs=3)
    for index in range(4):
        harness.add(f"r{index}", prompt_of(index, 12), max_tokens=20, ignore_eos=True)
    assert starts(harness.step()) == {"r0": 0, "r1": 1, "r2": 0, "r3": 1}
    harness.scheduler.abort(["r1", "r3"])
    while not (step := harness.step()).preempted_request_ids:
        assert not step.new_requests
    assert step.preempted_request_ids == ["r2"]
    assert starts(step) == {"r2": 1}, "in the same step"
    assert harness.scheduler.stats().num_preemptions == 1
    harness.run()
    harness.check_result("r0")
    harness.check_result("r2")


def test_what_a_failed_step_left_on_another_rank_is_not_found():
    """A request moves while a step that computes its prompt is in flight, and that step fails."""
    harness = make_harness(num_blocks=9, max_num_batched_tokens=3, max_num_seqs=2)
    occupy(harness, 1, 35, "other")
    occupy(harness, 0, 3, "old")
    prompt = prompt_of(2, 22)
    harness.add("moves", prompt, max_tokens=2, ignore_eos=True)
    harness.runner.failures["moves"] = "injected"
    assert starts(harness.schedule()) == {"moves": 0}
    harness.scheduler.abort(["other"])
    while "moves" not in (step := harness.schedule()).preempted_request_ids:
        assert "moves" not in step.samples
    assert starts(step) == {"moves": 1}
    while harness.in_flight:
        harness.read()
    assert harness.failed == ["moves"]
    harness.scheduler.abort(["old"])
    harness.add("again", prompt, max_tokens=2, ignore_eos=True)
    harness.run()
    harness.check_result("again")


# --- all ranks together -------------------------------------------------------------------------------------


def test_statistics_add_up_and_a_reset_reaches_all():
    harness = make_harness(4, num_blocks=16)
    prompts = [prompt_of(index, 12) for index in range(4)]
    for index, prompt in enumerate(prompts):
        harness.add(f"r{index}", prompt, max_tokens=9, ignore_eos=True)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_blocks, stats.num_free_blocks) == (4, 4 * 17, 4 * 13)
    assert stats.kv_cache_usage == pytest.approx(12 / 64)
    assert stats.step_tokens == 48
    harness.run()
    for index, prompt in enumerate(prompts):
        harness.add(f"again{index}", prompt, max_tokens=2)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8 * 12, 4 * 8)
    harness.scheduler.reset_prefix_cache()
    assert not any(kv_cache.pool.cached_blocks() for kv_cache in harness.scheduler.kv_caches)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_do_not_depend_on_the_number_of_ranks(depth):
    rng = random.Random(depth)
    requests = [
        (prompt_of(rng.randrange(4), rng.randrange(1, 40)), rng.randrange(1, 12), rng.choice([None, "a"]))
        for _ in range(40)
    ]
    for data_parallel_size in (1, 2, 4):
        harness = make_harness(
            data_parallel_size, depth=depth, num_blocks=15, max_num_seqs=4, max_num_batched_tokens=16
        )
        for index, (prompt, max_tokens, salt) in enumerate(requests):
            harness.add(
                f"r{index}",
                prompt,
                max_tokens=max_tokens,
                cache_salt=salt,
                bad_words=[[1, 2]] * (index % 5 == 0),
            )
            harness.step()
        harness.run()
        for index in range(len(requests)):
            harness.check_result(f"r{index}")

"""Prompt tokens by one path, generated ones by the other: whatever else happens, also where blocks could be shared.

The fake runner leaves other keys and values where a token is computed as a decoding row, and refuses steps which
compute a token by the wrong path or read a block that was written by the other one.
"""

from __future__ import annotations

import random

import pytest
from scheduler_harness import Harness, generate_alone, make_request

from jaxserve.kv_cache.block_hash import extend_block_hashes


def continuation(rng: random.Random, harness: Harness, prompts: list[list[int]]) -> list[int]:
    """A prompt that was there before, perhaps with the beginning of what it was answered."""
    prompt = rng.choice(prompts)
    request = make_request("alone", prompt, max_tokens=20, ignore_eos=True)
    output, *_ = generate_alone(request, harness.max_model_len, separate_paths=True)
    return prompt + output[: rng.choice([0, 0, 1, 4, 9, 20])]


@pytest.mark.parametrize("depth", [0, 1])
def test_conversations_in_a_small_cache(depth: int) -> None:
    rng = random.Random(depth)
    replayed = preemptions = cached = 0
    for turn in range(30):
        chunked, block_size = turn % 8 > 0, rng.choice([1, 2, 4])
        harness = Harness(
            num_blocks=rng.randint(44, 70) // block_size, block_size=block_size, depth=depth, separate_paths=True,
            max_num_seqs=rng.randint(4, 8), max_num_batched_tokens=rng.randint(8, 24) if chunked else 32,
            max_model_len=64, enable_chunked_prefill=chunked, enable_prefix_caching=turn % 3 > 0,
        )  # fmt: skip
        prompts = [[rng.randrange(50) for _ in range(rng.randint(1, 6))] for _ in range(3)]
        for number in range(12):
            prompt = continuation(rng, harness, prompts)
            harness.add(f"r{number}", prompt, max_tokens=rng.randint(8, 14), ignore_eos=rng.random() < 0.8)
            if rng.random() < 0.1:
                replayed += sum(len(harness.step().replayed_request_ids) for _ in range(rng.randint(1, 9)))
        replayed += sum(len(step.replayed_request_ids) for step in harness.run())
        for request_id in harness.requests:
            harness.check_result(request_id)
        preemptions += harness.scheduler.stats().num_preemptions
        cached += harness.scheduler.stats().prefix_cache_hits
    assert replayed > 100
    assert preemptions > 50
    assert cached > 100


def test_a_resumed_request_finds_its_own_blocks() -> None:
    harness = Harness(block_size=2, separate_paths=True)
    request = harness.add("r", [7, 8, 9], max_tokens=12, ignore_eos=True)
    for _ in range(9):
        harness.step()
    rank = harness.scheduler._lifecycle.ranks[0]
    harness.scheduler._lifecycle.preempt_last(rank)
    step = harness.step()
    assert request.num_computed_tokens == len(request.all_token_ids) - 1 or step.replayed_request_ids
    assert step.new_requests[0].num_computed_tokens >= 8, "what it generated was computed anew"
    harness.run()
    harness.check_result("r")


def test_a_conversations_next_turn_computes_what_was_generated() -> None:
    harness = Harness(block_size=2, separate_paths=True)
    harness.add("first", [7, 8, 9, 10], max_tokens=8, ignore_eos=True)
    harness.run()
    longer = [7, 8, 9, 10, *harness.results["first"].token_ids]
    harness.add("second", longer, max_tokens=3, ignore_eos=True)
    harness.run()
    harness.check_result("second")
    assert harness.requests["second"].num_cached_tokens == 4


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5])
def test_hashes_say_where_the_prompt_ended(num_prompt: int) -> None:
    """Equal tokens, of which other ones were generated: the first block with a generated token sets them apart."""
    tokens, whole = [3, 1, 4, 1, 5, 9, 2, 6], make_request("whole", [3, 1, 4, 1, 5, 9, 2, 6])
    request = make_request("r", tokens[:num_prompt])
    request.all_token_ids += tokens[num_prompt:]
    hashes = extend_block_hashes(request, 2, separate_paths=True)
    common = num_prompt // 2
    expected = extend_block_hashes(whole, 2, separate_paths=True)
    assert hashes[:common] == expected[:common]
    assert set(hashes[common:]).isdisjoint(expected)
    assert expected == extend_block_hashes(make_request("plain", tokens), 2)

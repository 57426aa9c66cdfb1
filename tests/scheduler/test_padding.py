"""Steps that would be mostly padding end a prompt's chunk at the size below; nothing is lost by it."""

from __future__ import annotations

import pytest
from scheduler_harness import Harness

from jaxserve.scheduler.padding import StepSizes

SIZES = (8, 16, 32)


def harness(**options: object) -> Harness:
    return Harness(**{"step_sizes": SIZES, "num_blocks": 200, **options})


def tokens_of(h: Harness) -> list[dict[str, int]]:
    return [step.num_scheduled_tokens for step in h.run() if step.num_scheduled_tokens]


@pytest.mark.parametrize(
    ("num_tokens", "excess"),
    [(1, 0), (8, 0), (9, 1), (13, 5), (14, 0), (16, 0), (17, 1), (26, 10), (27, 0), (32, 0), (33, 0)],
)
def test_how_much_is_put_off(num_tokens: int, excess: int) -> None:
    """Up to two thirds of the way; below the smallest size and beyond the largest nothing."""
    assert StepSizes(SIZES).excess(num_tokens) == excess
    assert StepSizes([]).excess(num_tokens) == 0


def test_a_prompt_is_cut_at_the_size_below() -> None:
    h = harness()
    h.add("a", list(range(20)), max_tokens=2, ignore_eos=True)
    assert tokens_of(h) == [{"a": 16}, {"a": 4}, {"a": 1}]
    h.check_result("a")


def test_the_last_ones_are_cut_and_keep_a_token() -> None:
    h = harness()
    for first, (name, length) in enumerate((("a", 10), ("b", 7), ("c", 4))):
        h.add(name, [first, *range(1, length)], max_tokens=1, ignore_eos=True)
    assert tokens_of(h) == [{"a": 10, "b": 5, "c": 1}, {"b": 2, "c": 3}]
    for name in "abc":
        h.check_result(name)


def test_decoding_rows_and_whole_prompts_stay() -> None:
    h = harness(enable_chunked_prefill=False)
    h.add("a", list(range(20)), max_tokens=1)
    assert tokens_of(h) == [{"a": 20}]
    h = harness(max_num_batched_tokens=64, max_num_seqs=32)
    for index in range(9):
        h.add(f"{index}", [index], max_tokens=2, ignore_eos=True)
    assert [len(step) for step in tokens_of(h)] == [9, 9]


def test_a_prompt_goes_on_where_decoding_rows_fill_a_size() -> None:
    """Six rows decode: of nine prompt tokens two would stay in a step of eight, so it takes sixteen."""
    h = harness(max_num_batched_tokens=64, max_num_seqs=32)
    for index in range(6):
        h.add(f"{index}", [index], max_tokens=4, ignore_eos=True)
    h.step()
    h.add("long", list(range(7)), max_tokens=1, ignore_eos=True)
    assert tokens_of(h)[0]["long"] == 7
    h.check_result("long")

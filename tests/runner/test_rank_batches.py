"""Requests keep to the rank that the scheduler gave them, and a step's output is read from the right rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxserve import SamplingParams
from jaxserve.runner.rank_batches import RankBatches, sampling_rows
from jaxserve.step import NewRequestData, SchedulerOutput

pytestmark = pytest.mark.device


def request(request_id: str, rank: int, **params: int) -> NewRequestData:
    sampling = SamplingParams(**params)
    return NewRequestData(request_id, [5, 6, 7], 3, sampling, 0, [], [], [[1]], 0, data_rank=rank)


def parts(*ranks: str) -> list:
    return [SimpleNamespace(request_ids=list(names)) for names in ranks]


def test_a_request_is_where_it_was_put_until_it_leaves():
    rows = RankBatches(2, 4, 32)
    rows.add(request("a", 1))
    rows.add(request("b", 0, prompt_logprobs=2))
    assert [list(batch.states) for batch in rows.batches] == [["b"], ["a"]]
    assert (rows.rank_of("a"), rows.of("a")) == (1, rows.batches[1])
    assert rows.scores_prompts(SchedulerOutput(0, num_scheduled_tokens={"a": 1, "b": 1}))
    assert not rows.scores_prompts(SchedulerOutput(0, num_scheduled_tokens={"a": 1}))
    for request_id in ("a", "a", "never seen"):
        rows.remove(request_id)
    assert [list(batch.states) for batch in rows.batches] == [["b"], []]
    rows.add(request("a", 0))  # preempted, it starts anew elsewhere
    assert rows.of("a") is rows.batches[0]
    batches = rows.batches
    rows.clear()
    assert rows.batches is not batches
    assert not any(batch.states for batch in rows.batches)
    assert rows.rank_of("a") == 0


@pytest.mark.parametrize(
    ("by_rank", "replayed", "samples", "expected"),
    [
        ((2, 1), set(), set(), [(0, "a"), (1, "b"), (8, "d")]),
        ((2, 1), set(), {"c", "f"}, [(0, "a"), (1, "b"), (2, "c"), (8, "d"), (10, "f")]),
        ((3, 3), set(), set(), [(0, "a"), (1, "b"), (2, "c"), (8, "d"), (9, "e"), (10, "f")]),
        ((3, 3), {"a", "f"}, set(), [(1, "b"), (2, "c"), (8, "d"), (9, "e")]),
    ],
)
def test_who_samples(by_rank, replayed, samples, expected):
    """Rows that decode, all but those that replay a token; and those whose tokens are all scheduled."""
    step = SchedulerOutput(
        0, samples=samples, replayed_request_ids=replayed, num_decode_rows=sum(by_rank),
        num_decode_rows_by_rank=by_rank,
    )  # fmt: skip
    assert sampling_rows(parts("abc", "def"), step, 8) == expected

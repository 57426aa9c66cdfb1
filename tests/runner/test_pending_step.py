"""What is read of a step, and for whom."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.runner.pending_step import NO_FINITE_LOGITS, DispatchedStep
from jaxserve.sampling.sampler import SamplerOutput

pytestmark = pytest.mark.device


@pytest.mark.parametrize("seed", range(50))
def test_each_row_gets_its_token_or_why_it_has_none(seed):
    rng = random.Random(seed)
    num_rows = rng.choice((1, 3, 16))
    rows = [(row, f"r{row}") for row in range(num_rows) if rng.random() < 0.8]
    token_ids = [-1 if seed % 3 == 0 and rng.random() < 0.2 else rng.randrange(99) for _ in range(num_rows)]
    exhausted = {name for _, name in rows if seed % 2 and rng.random() < 0.2}
    read: list[dict[str, list[int]]] = []
    sampled = SamplerOutput(np.array(token_ids, np.int32) if rows else Ready(), logprobs=None)
    step = DispatchedStep(7, sampled, rows, {}, [], read.append, exhausted)
    output = step.result()
    assert output.sampled_token_ids == {
        name: [token_ids[row]] for row, name in rows if token_ids[row] >= 0 and name not in exhausted
    }
    assert output.failed == {
        name: NO_FINITE_LOGITS for row, name in rows if token_ids[row] < 0 and name not in exhausted
    }
    assert (output.step_id, output.exhausted) == (7, exhausted)
    assert step.result() is output
    assert read == [output.sampled_token_ids]


class Ready:
    """An array that nobody reads."""

    def block_until_ready(self) -> None:
        pass

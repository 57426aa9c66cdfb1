"""Large top-k thresholds against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import filters

pytestmark = pytest.mark.device

find = jax.jit(filters.top_k_threshold)
advance = jax.jit(filters.advance)
TOTAL = 2**31 - 2**22


def check(weights, top_k, active=None):
    weights = np.asarray(weights, np.int64)
    active = np.ones(len(weights), bool) if active is None else active
    threshold = find(
        weights.astype(np.int32), weights.max(-1).astype(np.int32), np.asarray(top_k, np.int32), active
    )
    for row, (row_weights, row_threshold) in enumerate(zip(weights, np.asarray(threshold))):
        kept = row_weights >= 1
        if active[row] and top_k[row] < kept.sum():
            kept &= row_weights >= np.sort(row_weights)[-top_k[row]]
        np.testing.assert_array_equal(row_weights >= row_threshold, kept)


def random_weights(rng, kind, size):
    logits = {
        "normal": lambda: rng.normal(size=size) * rng.choice([0.01, 1, 5, 30]),
        "ties": lambda: rng.integers(0, 4, size) * 1.0,
        "flat": lambda: np.zeros(size),
        "peak": lambda: np.where(np.arange(size) == rng.integers(size), 50.0, rng.normal(size=size)),
        "coarse": lambda: np.round(rng.normal(size=size) * 8) / 4,  # bfloat16's steps at 16 to 32
    }[kind]()
    probabilities = np.exp(logits - logits.max())
    return np.round(probabilities * (TOTAL / probabilities.sum())).astype(np.int64)


ROW = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["normal", "ties", "flat", "peak", "coarse"]),
        "top_k": st.sampled_from([1, 2, 3, 10, 64, 10_000, 2**31 - 1]) | st.integers(1, 700),
        "active": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([5, 650]), st.integers(0, 2**32), st.lists(ROW, min_size=4, max_size=4))
def test_thresholds_match_sorting(size, seed, rows):
    rng = np.random.default_rng(seed)
    weights = np.stack([random_weights(rng, row["kind"], size) for row in rows])
    check(weights, [row["top_k"] for row in rows], np.array([row["active"] for row in rows]))


def test_thresholds_of_a_real_vocabulary():
    rng = np.random.default_rng(0)
    weights = np.stack([random_weights(rng, "normal", 151_936) for _ in range(4)])
    check(weights, [65, 400, 1000, 100_000])


@pytest.mark.parametrize("top", [1, 2, 2**16 + 1, 2**27, 2**31 - 2])
def test_adjacent_integers_are_told_apart(top):
    weights = np.maximum(top - np.arange(7), 0)[None]
    for k in range(1, 8):
        check(weights, [k])


def test_rows_without_weight():
    check([[0, 0, 0], [2**31 - 2, 0, 1]], [2, 2])


def count_passes(weights, top_k):
    weights = jnp.asarray(weights, jnp.int32)[None]
    search = filters.start_search(jnp.max(weights, -1), jnp.array([True]))
    passes = 0
    while np.asarray(search.unfinished).any():
        search = advance(search, weights, jnp.array([top_k]))
        passes += 1
        assert passes < 100
    return passes


def test_passes_are_few_and_bounded():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=640) * 3
    assert count_passes(np.round(np.exp(logits) / np.exp(logits).sum() * TOTAL), 100) <= 5
    # Equal tokens at the threshold force the search down to a single integer.
    ties = np.full(640, 3_000_001)
    ties[:3] = 3_000_002
    assert count_passes(ties, 100) <= 9
    assert count_passes([2**30, 2**30 - 1], 1) <= 9

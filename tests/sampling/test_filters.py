"""top-k and top-p thresholds against a sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import filters

pytestmark = pytest.mark.device

find = jax.jit(filters.find_threshold)
TOTAL = 2**31 - 2**22


def kept_by_sorting(weights, top_k, top_p):
    """Which tokens the filters keep, by definition; ``weights`` is one row of int64."""
    kept = weights >= 1
    if 0 < top_k < kept.sum():
        kept &= weights >= np.sort(weights)[-top_k]
    if top_p < 1 and kept.any():
        total = int(weights[kept].sum())
        target = min(max(int(np.float32(top_p) * np.float32(total)), 1), total)
        values = np.unique(weights[kept])[::-1]
        tails = np.cumsum([int(weights[weights == value].sum()) for value in values])
        kept &= weights >= values[np.argmax(tails >= target)]
    return kept


def check(weights, top_k, top_p, active=None):
    weights = np.asarray(weights, np.int64)
    active = np.ones(len(weights), bool) if active is None else active
    threshold = find(
        weights.astype(np.int32), weights.max(-1).astype(np.int32), np.asarray(top_k, np.int32),
        np.asarray(top_p, np.float32), active,
    )  # fmt: skip
    for row, (row_weights, row_threshold) in enumerate(zip(weights, np.asarray(threshold))):
        kept = kept_by_sorting(row_weights, top_k[row], top_p[row]) if active[row] else row_weights >= 1
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
        "top_k": st.sampled_from([0, 2, 3, 10, 64, 10_000, 2**31 - 1]) | st.integers(0, 700),
        "top_p": st.sampled_from([1.0, 0.5, 0.9, 0.999999, 1e-9]) | st.floats(1e-6, 1.0),
        "active": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([5, 650]), st.integers(0, 2**32), st.lists(ROW, min_size=4, max_size=4))
def test_thresholds_match_sorting(size, seed, rows):
    rng = np.random.default_rng(seed)
    weights = np.stack([random_weights(rng, row["kind"], size) for row in rows])
    column = {name: [row[name] for row in rows] for name in ("top_k", "top_p")}
    check(weights, **column, active=np.array([row["active"] for row in rows]))


def test_thresholds_of_a_real_vocabulary():
    rng = np.random.default_rng(0)
    weights = np.stack([random_weights(rng, "normal", 151_936) for _ in range(4)])
    check(weights, [400, 0, 1000, 100_000], [0.95, 0.95, 1.0, 0.5])


@pytest.mark.parametrize("top", [1, 2, 2**16 + 1, 2**27, 2**28 - 1])
def test_adjacent_integers_are_told_apart(top):
    weights = np.maximum(top - np.arange(7), 0)[None]
    for k in range(1, 8):
        check(weights, [k], [1.0])
        check(weights, [0], [k / 7])


def test_one_row_may_hold_everything():
    check([[2**31 - 1, 0, 0]], [2], [0.5])
    check([[2**31 - 3, 1, 1]], [2], [0.999999999])
    check([[0, 0, 0]], [2], [0.5])


def count_passes(weights, top_k, top_p):
    weights = jnp.asarray(weights, jnp.int32)[None]
    top_k, top_p = jnp.array([top_k]), jnp.array([top_p], jnp.float32)
    start = search = filters.start_search(jnp.max(weights, -1) + 1, top_k, top_p, jnp.array([True]))
    passes = 0
    while (np.asarray(search.stage) != filters.DONE).any():
        search = advance(search, start, weights, top_k, top_p)
        passes += 1
        assert passes < 100
    return passes


advance = jax.jit(filters.advance)


def test_passes_are_few_and_bounded():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=640) * 3
    weights = np.round(np.exp(logits) / np.exp(logits).sum() * TOTAL)
    assert count_passes(weights, 100, 1.0) <= 5
    assert count_passes(weights, 0, 0.9) <= 5
    # Equal tokens at the threshold force each stage down to a single integer.
    ties = np.full(640, 3_000_001)
    ties[:3] = 3_000_002
    assert count_passes(ties, 100, 0.5) <= 18
    assert count_passes([2**30, 2**30 - 1], 1, 0.5) <= 18


def test_top_p_filters_what_top_k_left():
    weights = np.array([[40, 30, 20, 10]]) * (TOTAL // 100)
    cases = [(0, 0.55, 2), (2, 0.55, 1), (2, 0.6, 2), (3, 0.99, 3), (0, 0.99, 4), (3, 1.0, 3), (0, 1e-9, 1)]
    for top_k, top_p, kept in cases:
        check(weights, [top_k], [top_p])
        assert kept_by_sorting(weights[0], top_k, top_p).sum() == kept

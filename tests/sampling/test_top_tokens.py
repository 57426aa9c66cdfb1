"""The largest tokens of a row, against a stable sort."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import top_tokens

pytestmark = pytest.mark.device


@functools.partial(jax.jit, static_argnames="k")
def top(logits, k):
    return top_tokens.top_tokens(top_tokens.chunk_logits(logits), k)


@jax.jit
def argmax(logits):
    chunked = top_tokens.chunk_logits(logits)
    return chunked.argmax, chunked.maximum


def random_logits(rng, kind, size):
    if kind == "normal":
        return rng.normal(size=size).astype(np.float32)
    if kind == "ties":
        return rng.integers(0, 5, size).astype(np.float32)
    if kind == "few":  # equal logits in chunks of different maxima
        return rng.choice([0, 1, 2], size, p=[0.98, 0.015, 0.005]).astype(np.float32)
    logits = rng.normal(size=size).astype(np.float32)
    logits[rng.random(size) < 0.9] = -np.inf
    if kind == "broken":
        logits[rng.random(size) < 0.1] = np.nan
    return logits


KINDS = st.lists(st.sampled_from(["normal", "ties", "few", "sparse", "broken"]), min_size=3, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    KINDS,
    st.sampled_from([(70, 5), (3000, 20), (3000, 64), (9001, 1), (9001, 64), (200, 200)]),
    st.integers(0, 2**32),
)
def test_top_tokens_are_a_stable_sort(kinds, shape, seed):
    size, k = shape
    rng = np.random.default_rng(seed)
    logits = np.stack([random_logits(rng, kind, size) for kind in kinds])
    values, ids = (np.asarray(x) for x in top(logits, k))
    clean = np.where(np.isnan(logits), -np.inf, logits)
    whole = ~np.isnan(logits).any(-1)  # which chunks of a broken row are looked at is up to the backend
    values, ids, clean = values[whole], ids[whole], clean[whole]
    order = np.argsort(-clean, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(values, np.take_along_axis(clean, order, -1))
    finite = values > -np.inf  # which of the impossible tokens fill up a row does not matter
    np.testing.assert_array_equal(ids[finite], order[finite])
    assert (ids >= 0).all()


@settings(max_examples=40, deadline=None)
@given(KINDS, st.sampled_from([1, 65, 3000]), st.integers(0, 2**32))
def test_argmax(kinds, size, seed):
    rng = np.random.default_rng(seed)
    logits = np.stack([random_logits(rng, kind, size) for kind in kinds])
    tokens, maximum = (np.asarray(x) for x in argmax(logits))
    for row in range(len(kinds)):
        if np.isnan(logits[row]).any():
            assert -1 <= tokens[row] < size
        elif logits[row].max() == -np.inf:
            assert tokens[row] == -1
        else:
            assert maximum[row] == logits[row].max()
            assert tokens[row] == logits[row].argmax()


def test_special_rows():
    rows = [
        [np.nan] * 3,
        [-np.inf] * 3,
        [-np.inf, -np.inf, -5],
        [np.inf, np.inf, 0],
        [-0.0, 0.0, -1],
        [1, 1, 1],
    ]
    np.testing.assert_array_equal(argmax(np.array(rows, np.float32))[0], [-1, -1, 2, 0, 0, 0])

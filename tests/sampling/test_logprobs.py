"""Log probabilities against float64."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling.logprobs import compute_logprobs

pytestmark = pytest.mark.device

compute = functools.partial(jax.jit, static_argnames="num_top")(compute_logprobs)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(70, 5), (3000, 20), (70, 70), (70, 0)]), st.integers(0, 2**32), st.floats(0.01, 30))
def test_logprobs_and_ranks(shape, seed, spread):
    size, num_top = shape
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(3, size)) * spread).astype(np.float32)
    logits[1] = np.round(logits[1]) + 0.0  # ties (and no -0.0, which sorts below 0.0)
    tokens = rng.integers(0, size, 3)
    result = compute(logits, tokens.astype(np.int32), num_top=num_top)
    exact = log_softmax(logits)
    chosen = np.take_along_axis(logits, tokens[:, None], -1)
    np.testing.assert_allclose(result.token_logprobs, exact[np.arange(3), tokens], rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(result.token_ranks, (logits > chosen).sum(-1) + 1)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :num_top]
    np.testing.assert_array_equal(result.top_ids, order)
    np.testing.assert_allclose(
        result.top_logprobs, np.take_along_axis(exact, order, -1), rtol=1e-6, atol=1e-5
    )
    assert result.top_logprobs.shape == (3, num_top)


def test_flat_tails_count():
    logits = np.full((1, 150_000), -19.0, np.float32)
    logits[0, 5] = 0
    result = compute(logits, np.array([5], np.int32), num_top=2)
    assert float(result.token_logprobs[0]) == pytest.approx(-np.log1p(149_999 * np.exp(-19)), abs=1e-7)


def test_the_top_logprob_of_a_token_is_its_own():
    logits = np.random.default_rng(0).normal(size=(4, 3000)).astype(np.float32)
    result = compute(logits, logits.argmax(-1).astype(np.int32), num_top=3)
    np.testing.assert_array_equal(result.token_logprobs, result.top_logprobs[:, 0])
    np.testing.assert_array_equal(result.token_ranks, 1)


def test_rows_without_numbers_do_not_disturb_others():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 300)).astype(np.float32)
    alone = compute(logits, np.arange(4, dtype=np.int32), num_top=5)
    logits[1], logits[2] = np.nan, np.inf
    logits[3, :10] = -np.inf
    result = compute(logits, np.array([0, 1, 2, 3], np.int32), num_top=5)
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(result)):
        np.testing.assert_array_equal(a[0], b[0])
    assert float(result.token_logprobs[3]) == -np.inf
    assert int(result.token_ranks[3]) == 291

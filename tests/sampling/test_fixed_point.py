"""Integer probabilities: exact sums, exact products, an exact inverse of the cumulated weights."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import fixed_point
from jaxserve.sampling.fixed_point import MAX_VOCAB

pytestmark = pytest.mark.device

sum_exact = jax.jit(fixed_point.sum_exact)
exp_shifted = jax.jit(fixed_point.exp_shifted)
pick = jax.jit(fixed_point.pick)
multiply_high = jax.jit(fixed_point.multiply_high)


@jax.jit
def weigh(exponentials):
    scale = fixed_point.weight_scale(fixed_point.sum_exact(exponentials))
    return fixed_point.to_weight(exponentials, scale), scale


SIZES = (1, 64, 65, 5003)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 2**32), st.floats(0.1, 40))
def test_sums_are_right_and_do_not_depend_on_order(size, seed, spread):
    rng = np.random.default_rng(seed)
    values = np.exp(-rng.random((2, size)) * spread).astype(np.float32)
    values[1] = rng.permutation(values[0])
    sums = np.asarray(sum_exact(values))
    assert sums[0] == sums[1]
    assert sums[0] == pytest.approx(math.fsum(values[0].tolist()), rel=2e-7, abs=size * 2.0**-49)


def test_the_largest_vocabulary_does_not_overflow():
    ones = np.ones((1, MAX_VOCAB), np.float32)
    assert float(sum_exact(ones)[0]) == MAX_VOCAB
    total = np.asarray(weigh(ones)[0]).astype(np.int64).sum()
    assert 2**30 < total < 2**31


def test_a_flat_tail_far_below_the_maximum_is_counted():
    values = np.full((1, 150_000), np.exp(-25.0), np.float32)
    values[0, 7] = 1
    assert float(sum_exact(values)[0]) == pytest.approx(1 + 149_999 * math.exp(-25), rel=1e-7)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 2**32), st.floats(0, 30))
def test_weights_are_probabilities_and_fit(size, seed, spread):
    logits = (np.random.default_rng(seed).normal(size=(2, size)) * spread).astype(np.float32)
    weights, scale = weigh(exp_shifted(logits, logits.max(-1)))
    weights = np.asarray(weights).astype(np.int64)
    total = weights.sum(-1, keepdims=True)
    assert (total < 2**31).all()
    assert (total > 2**30).all()
    assert (weights >= 0).all()
    assert (weights.max(-1) <= np.round(np.asarray(scale))).all()
    exact = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    # The exponential of a float32 difference d is off by about |d| * 2**-24; weights are rounded to 2**-31.
    np.testing.assert_allclose(weights / total, exact, rtol=1e-5, atol=2.0**-31)
    for row in range(2):  # monotone: sorting by logits sorts the weights
        assert (np.diff(weights[row][np.argsort(logits[row])]) >= 0).all()


@pytest.mark.parametrize("special", [np.nan, -np.inf])
def test_tokens_that_are_no_numbers_weigh_nothing(special):
    logits = np.array([[special, 0.0, special, -1.0], [special] * 4], np.float32)
    exponentials = exp_shifted(logits, np.array([0.0, -np.inf], np.float32))
    np.testing.assert_allclose(exponentials, [[0, 1, 0, np.exp(-1)], [0] * 4], rtol=1e-6)
    assert not np.asarray(weigh(exponentials)[0])[1].any()


def test_infinite_logits_take_all():
    logits = np.array([[np.inf, 3.0, np.inf, -np.inf]], np.float32)
    np.testing.assert_array_equal(exp_shifted(logits, np.array([np.inf], np.float32)), [[1, 0, 1, 0]])


WORD = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**16 - 1, 2**16, 2**31, 2**32 - 1])


@given(WORD, WORD)
def test_multiply_high(a, b):
    result = multiply_high(np.array([a], np.uint32), np.array([b], np.uint32))
    assert int(result[0]) == a * b >> 32


def expected_pick(weights, bits):
    target = int(weights.sum()) * int(bits) >> 32
    return int(np.searchsorted(np.cumsum(weights), target, side="right"))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 2**32), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_pick_inverts_the_cumulated_weights(size, seed, bits, density):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 2**31 // size, (4, size)) * (rng.random((4, size)) < density)
    weights[3] = 0
    weights[3, rng.integers(size)] = 1
    random_bits = np.array([bits, 0, 2**32 - 1, bits], np.uint32)
    chosen = np.asarray(pick(weights.astype(np.int32), random_bits))
    for row in range(4):
        if weights[row].sum() == 0:
            assert chosen[row] == 0
        else:
            assert chosen[row] == expected_pick(weights[row], random_bits[row])
            assert weights[row, chosen[row]] > 0


@pytest.mark.parametrize("size", SIZES)
def test_pick_reaches_both_ends(size):
    weights = np.zeros((4, size), np.int32)
    weights[:2, 0] += 1000
    weights[:2, -1] += 1000
    weights[2:, 0] = 2**31 - 1
    chosen = pick(weights, np.array([0, 2**32 - 1, 0, 2**32 - 1], np.uint32))
    np.testing.assert_array_equal(chosen, [0, size - 1, 0, 0])

"""SamplerState: fixed-shape updates, and rows that must not be touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling import state as sampler_state
from jaxserve.sampling.state import HISTORY_CHUNK, MAX_COUNT, PROMPT_BIT, SamplerState
from jaxserve.sampling_params import MAX_LOGIT_BIAS

pytestmark = pytest.mark.device

S, V = 4, 70
reset_row = jax.jit(sampler_state.reset_row)
add_history = jax.jit(sampler_state.add_history)
MASK_ROWS = sampler_state.MASK_ROWS[0]
set_mask_rows = jax.jit(sampler_state.set_mask_rows)
set_bias_row = jax.jit(sampler_state.set_bias_row)
record_tokens = jax.jit(sampler_state.record_tokens, static_argnames="count")


@pytest.fixture
def state():
    return SamplerState.create(S, V)


def chunk(ids):
    out = np.full(HISTORY_CHUNK, -1, np.int32)
    out[: len(ids)] = ids
    return out


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def test_sizes():
    state = SamplerState.create(3, V)
    assert sampler_state.state_bytes(3, V) == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert sampler_state.state_bytes(256, 151_936) < 90e6
    assert sampler_state.state_bytes(1024, 128_256) < 300e6


def test_history_counts_output_and_marks_prompt(state):
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, V, HISTORY_CHUNK), rng.integers(0, V, 700)
    state = add_history(state, 2, chunk(prompt), False)
    for part in (output[:300], output[300:]):
        state = add_history(state, 2, chunk(part), True)
    state = add_history(state, 1, chunk([V - 1, 0, V, V + 3, -1, 5, 5]), True)
    history = np.asarray(state.history)
    np.testing.assert_array_equal(history[2] & MAX_COUNT, np.bincount(output, minlength=V))
    np.testing.assert_array_equal(history[2] & PROMPT_BIT != 0, np.isin(np.arange(V), prompt))
    expected = np.zeros(V)
    expected[[0, 5, V - 1]] = 1, 2, 1
    np.testing.assert_array_equal(history[1], expected)
    assert not history[[0, 3]].any()
    assert not np.asarray(reset_row(state, 2).history)[2].any()
    assert np.asarray(reset_row(state, 2).history)[1].any()


def test_counts_saturate_and_leave_the_prompt_bit_alone(state):
    state = add_history(state, 0, chunk([3]), False)
    for _ in range(MAX_COUNT // HISTORY_CHUNK + 2):
        state = add_history(state, 0, chunk([3] * HISTORY_CHUNK), True)
    assert int(state.history[0, 3]) == PROMPT_BIT | MAX_COUNT
    state = record_tokens(state, jnp.array([0]), jnp.array([3]), count=True)
    assert int(state.history[0, 3]) == PROMPT_BIT | MAX_COUNT


@pytest.mark.parametrize("row", [-1, S, S + 1, 1000])
def test_rows_out_of_range_are_dropped(state, row):
    state = add_history(state, 1, chunk([1, 2]), True)
    assert same(reset_row(state, row), state)
    assert same(add_history(state, row, chunk([1]), True), state)
    bias = np.ones(MAX_LOGIT_BIAS, np.int32), np.ones(MAX_LOGIT_BIAS, np.float32)
    assert same(set_bias_row(state, row, *bias), state)
    rows = np.full(MASK_ROWS, row, np.int32)
    assert same(set_mask_rows(state, rows, np.ones((MASK_ROWS, 3), np.int32)), state)


def test_masks_and_bias_go_to_their_rows(state):
    rows = np.full(MASK_ROWS, S, np.int32)
    rows[:2] = 3, 0
    bits = np.arange(MASK_ROWS * 3, dtype=np.int32).reshape(MASK_ROWS, 3) - 4
    state = set_mask_rows(state, rows, bits)
    np.testing.assert_array_equal(state.token_mask, [bits[1], [0] * 3, [0] * 3, bits[0]])
    ids, values = (
        np.arange(MAX_LOGIT_BIAS, dtype=np.int32),
        np.linspace(-1, 1, MAX_LOGIT_BIAS, dtype=np.float32),
    )
    state = set_bias_row(state, 1, ids, values)
    np.testing.assert_array_equal(state.bias_ids[1], ids)
    np.testing.assert_array_equal(state.bias_values[1], values)
    assert not np.asarray(state.bias_ids)[[0, 2, 3]].any()


def test_padding_rows_record_nothing(state):
    rows, tokens = jnp.array([2, S, 0, S, S]), jnp.array([7, 8, 9, 8, 7])
    new = record_tokens(state, rows, tokens, count=True)
    np.testing.assert_array_equal(new.last_token_ids, [9, 0, 7, 0, 0])
    expected = np.zeros((S, V))
    expected[2, 7] = expected[0, 9] = 1
    np.testing.assert_array_equal(new.history, expected)
    uncounted = record_tokens(state, rows, tokens, count=False)
    np.testing.assert_array_equal(uncounted.last_token_ids, new.last_token_ids)
    assert not np.asarray(uncounted.history).any()

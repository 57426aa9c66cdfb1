"""Logits processors against plain numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import logits_processors
from jaxserve.sampling.metadata import (
    SamplingMetadata,
    make_table,
    set_masked,
    step_features,
    write_row,
)
from jaxserve.sampling.state import MAX_COUNT, PROMPT_BIT, SamplerState
from jaxserve.sampling.token_mask import pack_mask
from jaxserve.sampling_params import MAX_LOGIT_BIAS, SamplingParams

pytestmark = pytest.mark.device

S, V, R = 5, 70, 4


@jax.jit
def process(logits, packed, features, state):
    metadata = SamplingMetadata.from_packed(packed, features)
    return logits_processors.process_logits(logits, metadata, state)


def oracle(logits, params, mask, history):
    """One row in float64, in vLLM's order: mask, bias, penalties."""
    logits = logits.astype(np.float64)
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    count, seen = history & MAX_COUNT, history != 0
    repetition = np.where(seen, params.repetition_penalty, 1.0)
    logits = np.where(logits > 0, logits / repetition, logits * repetition)
    return logits - params.frequency_penalty * count - params.presence_penalty * (count > 0)


def random_history(rng):
    history = rng.choice([0, 0, 0, 1, 2, 7, MAX_COUNT], V)
    return (history | np.where(rng.random(V) < 0.2, PROMPT_BIT, 0)).astype(np.uint16)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.1, 2.0, -1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.1, 0.5, 3.0]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=V),
)


def make_state(rng, params, masks):
    """A state whose unused parts hold rubbish: rows that do not ask must not see them."""
    ids = rng.integers(0, V, (S, MAX_LOGIT_BIAS))
    values = rng.normal(size=(S, MAX_LOGIT_BIAS)) * 50
    words = np.stack([pack_mask(rng.random(V) < 0.5) for _ in range(S)])
    for row, row_params in enumerate(params):
        entries = list((row_params.logit_bias or {}).items())
        for place, (token, bias) in enumerate(entries):
            ids[row, place], values[row, place] = token, bias
        if masks[row] is not None:
            words[row] = pack_mask(masks[row])
    return SamplerState(
        last_token_ids=jnp.zeros(S + 1, jnp.int32),
        history=jnp.asarray(np.stack([random_history(rng) for _ in range(S)])),
        token_mask=jnp.asarray(words),
        bias_ids=jnp.asarray(ids, jnp.int32),
        bias_values=jnp.asarray(values, jnp.float32),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=R, max_size=R), st.integers(0, 2**32))
def test_processing_matches_numpy(params, seed):
    rng = np.random.default_rng(seed)
    masks = [rng.random(V) < 0.3 if rng.random() < 0.5 else None for _ in range(R)]
    state = make_state(rng, params, masks)
    table = make_table(S)
    for row, row_params in enumerate(params):
        write_row(table, row, row_params, seed=0)
        set_masked(table, row, masks[row] is not None)
    order = rng.permutation(R)
    packed = np.concatenate([table[order], table[[S]]])  # one padding row
    logits = (rng.normal(size=(R + 1, V)) * 5).astype(np.float32)
    logits[-1] = np.nan
    result = np.asarray(process(logits, packed, int(step_features(packed)), state))
    for place, row in enumerate(order):
        expected = oracle(logits[place], params[row], masks[row], np.asarray(state.history)[row].astype(int))
        np.testing.assert_allclose(result[place], expected, rtol=1e-5, atol=1e-4)
        asks = params[row].needs_penalties or params[row].logit_bias or masks[row] is not None
        if not asks:
            np.testing.assert_array_equal(result[place], logits[place])


@pytest.mark.parametrize("repetition", [1e-300, 1e-42, 1e30, 1e300])
def test_extreme_repetition_penalties_give_no_nan(repetition):
    table = make_table(S)
    write_row(table, 0, SamplingParams(temperature=0, repetition_penalty=repetition), 0)
    state = make_state(np.random.default_rng(0), [SamplingParams()], [None])
    logits = np.tile(np.array([0.0, 1.0, -1.0, -np.inf, 1e-30], np.float32), (1, V // 5))
    assert not np.isnan(process(logits, table[:1], int(step_features(table)), state)).any()


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_mask_bits_reach_their_tokens(size):
    rng = np.random.default_rng(size)
    allowed = rng.random(size) < 0.5
    state = SamplerState.create(1, size)
    state = jax.tree.map(jnp.asarray, state)
    state = SamplerState(**{**vars(state), "token_mask": jnp.asarray(pack_mask(allowed))[None]})
    table = make_table(1)
    set_masked(table, 0, True)
    metadata = SamplingMetadata.from_packed(jnp.asarray(table[:1]), jnp.int32(int(step_features(table))))
    mask = functools.partial(logits_processors.apply_token_mask, metadata=metadata, state=state)
    result = np.asarray(mask(jnp.ones((1, size))))
    np.testing.assert_array_equal(result[0] == 1, allowed)
    assert (result[0][~allowed] == -np.inf).all()


def test_a_full_bias_table():
    params = SamplingParams(temperature=0, logit_bias={token: token / 10 for token in range(MAX_LOGIT_BIAS)})
    size = MAX_LOGIT_BIAS + 10
    state = SamplerState.create(2, size)
    state = SamplerState(
        **{
            **vars(state),
            "bias_ids": jnp.broadcast_to(jnp.arange(MAX_LOGIT_BIAS, dtype=jnp.int32), (2, MAX_LOGIT_BIAS)),
            "bias_values": jnp.broadcast_to(jnp.arange(MAX_LOGIT_BIAS) / 10, (2, MAX_LOGIT_BIAS)).astype(
                jnp.float32
            ),
        }
    )
    table = make_table(2)
    write_row(table, 1, params, 0)
    packed = table[[1, 0]]
    result = np.asarray(process(jnp.zeros((2, size)), packed, int(step_features(packed)), state))
    expected = np.zeros(size)
    expected[:MAX_LOGIT_BIAS] = np.minimum(np.arange(MAX_LOGIT_BIAS) / 10, 100)
    np.testing.assert_allclose(result[0][: MAX_LOGIT_BIAS - 24], expected[: MAX_LOGIT_BIAS - 24], rtol=1e-6)
    assert not result[0][MAX_LOGIT_BIAS:].any()
    assert not result[1].any()

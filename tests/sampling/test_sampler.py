"""sample(): the whole of it. Nearly all tests share one compiled program of R rows and V tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from jaxserve.sampling.metadata import (
    ALL_FEATURES,
    COLUMN,
    NUM_COLUMNS,
    Feature,
    SamplingMetadata,
    make_table,
    set_masked,
    step_features,
    write_row,
)
from jaxserve.sampling.random_bits import threefry2x32
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import SamplerState
from jaxserve.sampling.token_mask import pack_mask
from jaxserve.sampling_params import SamplingParams

pytestmark = pytest.mark.device

S, R, V = 70, 64, 300  # V is no multiple of a vector's width or of a chunk
GREEDY = SamplingParams(temperature=0)


@functools.partial(jax.jit, static_argnames="features")
def run(logits, packed, wanted, state, features=ALL_FEATURES):
    metadata = SamplingMetadata.from_packed(packed, wanted)
    return sample(logits, metadata, state, max_logprobs=4, features=features)


def pack(params, seeds=None, positions=0, rows=None, masked=(), size=R):
    """A step of ``size`` rows: those of ``params``, then padding. ``None`` is a padding row, too."""
    table = make_table(S)
    params = [*params, *[None] * (size - len(params))]
    rows = list(range(size)) if rows is None else [*rows, *[S] * (size - len(rows))]
    for place, (row, row_params) in enumerate(zip(rows, params)):
        if row_params is not None:
            write_row(table, row, row_params, place if seeds is None else int(seeds[place]))
            set_masked(table, row, place in masked)
    packed = table[[S if p is None else row for row, p in zip(rows, params)]]
    packed[:, COLUMN["positions"]] = positions
    return packed, np.int32(step_features(packed))


def fill(logits):
    """float32[n, v] -> [R, V]: impossible tokens, and padding rows of NaN."""
    logits = np.asarray(logits, np.float32)
    full = np.full((R, V), np.nan, np.float32)
    full[: len(logits)] = -np.inf
    full[: len(logits), : logits.shape[1]] = logits
    return full


def draw(logits, params, seeds=None, positions=0):
    packed, wanted = pack(params, seeds, positions)
    output, _ = run(fill(logits), packed, wanted, SamplerState.create(S, V))
    return np.asarray(output.token_ids)[: len(params)]


def change(state, **leaves):
    return SamplerState(**{**vars(state), **{name: jnp.asarray(leaf) for name, leaf in leaves.items()}})


# --- what is sampled
# -------------------------------------------------------------------------------------------


def distribution(logits, params):
    """Exact probabilities of one row by vLLM's definitions, in float64 (ties at a threshold are kept)."""
    scaled = logits.astype(np.float64) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    kept = probabilities >= params.min_p
    if 0 < params.top_k < kept.sum():
        kept &= probabilities >= np.sort(probabilities)[-params.top_k]
    probabilities = np.where(kept, probabilities, 0)
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        above = np.array([probabilities[probabilities > p].sum() for p in probabilities])
        probabilities = np.where(above < params.top_p, probabilities, 0)
    return probabilities / probabilities.sum()


def chi_square(counts, expected):
    """The statistic in standard deviations from its mean; bins that expect few are pooled."""
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    large = expected >= 5
    counts = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    used = expected > 0
    assert counts[~used].sum() == 0
    freedom = used.sum() - 1
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    return (statistic - freedom) / np.sqrt(2 * freedom) if freedom else 0.0


@pytest.mark.parametrize(
    "name, params",
    [
        ("temperature 1", SamplingParams()),
        ("temperature 0.5", SamplingParams(temperature=0.5)),
        ("temperature 2", SamplingParams(temperature=2.0)),
        ("min_p", SamplingParams(min_p=0.2)),
        ("top_k", SamplingParams(top_k=7)),
        ("large top_k", SamplingParams(temperature=1.5, top_k=100)),
        ("top_p", SamplingParams(temperature=1.5, top_p=0.7)),
        ("small top_p", SamplingParams(temperature=2.0, top_p=0.2)),
        ("all", SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05)),
        ("all, large top_k", SamplingParams(temperature=2.0, top_k=120, top_p=0.8, min_p=0.01)),
    ],
)
def test_frequencies_match_the_distribution(name, params):
    """Fixed seeds: it passes always or never. Chance alone would exceed 6 about once in 10**6 such tests."""
    logits = (np.random.default_rng(5).normal(size=V) * 2).astype(np.float32)
    expected = distribution(logits, params)
    counts = np.zeros(V)
    for position in range(100):
        counts += np.bincount(draw([logits] * R, [params] * R, range(R), position), minlength=V)
    assert not counts[expected == 0].any()
    assert chi_square(counts, expected * counts.sum()) < 6


def test_positions_and_seeds_give_independent_numbers():
    """Pairs of neighbouring positions, and of neighbouring seeds, fall evenly on a 4 x 4 grid."""
    tokens = np.stack([draw(np.zeros((R, 4)), [SamplingParams()] * R, range(R), i) for i in range(100)])
    for first, second in ((tokens[:-1], tokens[1:]), (tokens[:, :-1], tokens[:, 1:])):
        counts = np.bincount((first * 4 + second).ravel(), minlength=16)
        assert chi_square(counts, np.full(16, counts.sum() / 16)) < 6


def test_all_64_bits_of_a_seed_count():
    tokens = draw(np.zeros((R, V)), [SamplingParams()] * R, [1 << bit for bit in range(64)])
    assert len(set(tokens)) > 50


def test_rare_tokens_keep_their_proportions():
    """A chunk's tokens are weighed against each other, not against a maximum far above them."""
    logits = np.full(192, -18.0)
    logits[64:128] = np.log(np.arange(1, 65)) - 18
    counts = sum(
        np.bincount(draw([logits] * R, [SamplingParams()] * R, None, i), minlength=192) for i in range(60)
    )
    expected = np.exp(logits - logits.max())
    assert chi_square(counts, expected / expected.sum() * counts.sum()) < 6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.1, 1.0, 2.0]), st.floats(0.1, 30))
def test_only_possible_tokens_are_sampled(seed, temperature, spread):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(R, V)) * spread).astype(np.float32)
    logits[:, rng.random(V) < 0.5] = -np.inf
    logits[:, 7] = 0
    logits[:3, rng.integers(V)] = np.nan
    params = [
        SamplingParams(
            temperature=temperature,
            top_k=int(rng.choice([0, 2, 40, 64, 65, 200])),
            top_p=float(rng.choice([1.0, 0.9, 0.3, 1e-6])),
            min_p=float(rng.choice([0.0, 0.1, 1.0])),
        )
        for _ in range(R)
    ]
    tokens = draw(logits, params, rng.integers(0, 2**62, R))
    assert np.isfinite(logits[np.arange(R), tokens])[3:].all()
    assert ((tokens >= -1) & (tokens < V)).all()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(top_k=1),
        SamplingParams(temperature=1e-4),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=5, top_p=1e-9),
        SamplingParams(top_k=99, top_p=1e-9),
        SamplingParams(top_k=5, min_p=1.0),
    ],
)
def test_narrow_filters_leave_the_most_likely_token(params):
    logits = np.random.default_rng(0).normal(size=(R, V)).astype(np.float32) * 3
    np.testing.assert_array_equal(draw(logits, [params] * R), logits.argmax(-1))


def test_the_first_and_the_last_token_are_reached():
    logits = np.full((R, V), -np.inf)
    logits[:, [0, -1]] = 3
    for params in (
        SamplingParams(),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=99),
    ):
        assert set(draw(logits, [params] * R)) == {0, V - 1}


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.random.default_rng(1).integers(0, 3, (R, V))
    np.testing.assert_array_equal(draw(logits, [GREEDY] * R), logits.argmax(-1))


def test_rows_without_a_token_say_so():
    params = [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=99),
    ]
    logits = np.full((16, V), np.nan, np.float32)
    logits[5:10] = -np.inf
    logits[10:] = 0
    packed, wanted = pack([*params, *params, *params, GREEDY], masked=[15])
    output, state = run(fill(logits), packed, wanted, SamplerState.create(S, V))  # a mask that allows nothing
    tokens = np.asarray(output.token_ids)
    np.testing.assert_array_equal(tokens[:10], -1)
    assert ((tokens[10:15] >= 0) & (tokens[10:15] < V)).all()
    assert tokens[15] == -1
    np.testing.assert_array_equal(state.last_token_ids[:16], np.maximum(tokens[:16], 0))


# --- state, and what travels with a row
# ------------------------------------------------------------------------


def test_penalties_masks_and_bias_follow_the_rows_through_steps():
    """Six steps of four rows in changing order, against a plain loop."""
    rng = np.random.default_rng(1)
    no_repeat = SamplingParams(temperature=0, frequency_penalty=2, presence_penalty=2)
    params = [no_repeat, GREEDY, no_repeat, SamplingParams(temperature=0, logit_bias={5: 100.0})]
    rows = [3, 0, 69, 10]
    upper_half = np.arange(V) >= V // 2
    state = SamplerState.create(S, V)
    state = change(
        state,
        token_mask=state.token_mask.at[69].set(pack_mask(upper_half)),
        bias_ids=state.bias_ids.at[10, 0].set(5),
        bias_values=state.bias_values.at[10, 0].set(100.0),
    )
    logits = (rng.random((4, V)) * 1.5).astype(np.float32)
    counts = np.zeros((4, V))
    for step in range(6):
        order = rng.permutation(4)
        packed, wanted = pack(
            [params[i] for i in order],
            rows=[rows[i] for i in order],
            positions=step,
            masked=[list(order).index(2)],
        )
        output, state = run(fill(logits[order]), packed, wanted, state)
        for place, i in enumerate(order):
            scores = np.where(upper_half, logits[i], -np.inf) if i == 2 else logits[i].astype(float)
            scores = scores - (2 * counts[i] + 2 * (counts[i] > 0) if params[i] is no_repeat else 0)
            scores[5] += 100 if i == 3 else 0
            assert int(output.token_ids[place]) == scores.argmax()
            assert int(state.last_token_ids[rows[i]]) == scores.argmax()
            counts[i, scores.argmax()] += 1
    for i in range(4):
        np.testing.assert_array_equal(state.history[rows[i]], counts[i])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_padding_rows_change_nothing(value):
    state = SamplerState.create(S, V)
    state = jax.tree.map(lambda leaf: jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), state)
    packed, wanted = pack([])
    _, new = run(np.full((R, V), value, np.float32), packed, wanted | ALL_FEATURES, state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new)):
        np.testing.assert_array_equal(before, after)


def test_logprobs_are_of_the_raw_logits():
    logits = np.random.default_rng(3).normal(size=(3, V)).astype(np.float32)
    params = [
        SamplingParams(temperature=0.5, logprobs=2),
        SamplingParams(temperature=0, logit_bias={4: 100.0}, logprobs=0),
        GREEDY,
    ]
    state = SamplerState.create(S, V)
    state = change(
        state, bias_ids=state.bias_ids.at[1, 0].set(4), bias_values=state.bias_values.at[1, 0].set(100.0)
    )
    packed, wanted = pack(params)
    output, _ = run(fill(logits), packed, wanted, state)
    tokens = np.asarray(output.token_ids)[:3]
    assert tokens[1] == 4
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(output.logprobs.token_logprobs[:3], exact[np.arange(3), tokens], atol=1e-5)
    np.testing.assert_array_equal(output.logprobs.top_ids[:3], np.argsort(-logits, -1)[:, :4])
    assert output.logprobs.top_logprobs.shape == (R, 4)
    packed, wanted = pack([GREEDY])
    output, _ = run(fill(logits), packed, wanted, state)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(output.logprobs))


# --- one program, and the same answer in any company
# -----------------------------------------------------------


def mixed_params(rng):
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 0, 0, 1, 5, 64, 65, 200])),
        top_p=float(rng.choice([1.0, 0.95, 0.5])),
        min_p=float(rng.choice([0.0, 0.0, 0.02])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
        presence_penalty=float(rng.choice([0.0, 0.0, 0.7])),
        logprobs=int(rng.choice([0, 3])) if rng.random() < 0.3 else None,
    )


def random_state(rng):
    history = rng.choice([0, 0, 0, 1, 3, 0x8000, 0x8002], (S, V)).astype(np.uint16)
    masks = np.stack([pack_mask(rng.random(V) < 0.7) for _ in range(S)])
    return change(SamplerState.create(S, V), history=history, token_mask=masks)


def test_rows_do_not_depend_on_their_company():
    """The same rows alone, in pairs, and among 64, in any order: the same tokens and logprobs, bit for
    bit.
    """
    rng = np.random.default_rng(4)
    state = random_state(rng)
    logits = (rng.normal(size=(R, V)) * 2).astype(np.float32)
    params = [mixed_params(rng) for _ in range(R)]
    packed, _ = pack(params, rng.integers(0, 2**62, R), rng.integers(0, 1000, R), masked=range(0, R, 3))

    def outcome(rows):
        wanted = np.int32(step_features(packed[rows]) | Feature.LOGPROBS)
        output, _ = run(logits[rows], packed[rows], wanted, state)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(output)]
        return {row: tuple(leaf[place].tobytes() for leaf in leaves) for place, row in enumerate(rows)}

    everyone = outcome(np.arange(R))
    for num_rows, repeats in ((1, R), (2, 30), (33, 5), (R, 2)):
        for repeat in range(repeats):
            chosen = [repeat] if num_rows == 1 else rng.permutation(R)[:num_rows]
            for row, result in outcome(np.asarray(chosen)).items():
                assert result == everyone[row]


def test_one_compilation_serves_every_mix():
    rng = np.random.default_rng(0)
    state = random_state(rng)
    packed, wanted = pack([GREEDY])
    run(jnp.zeros((R, V)), packed, wanted, state)
    compiled = run._cache_size()
    for step in range(30):
        params = [None if rng.random() < 0.3 else mixed_params(rng) for _ in range(R)]
        packed, wanted = pack(params, positions=step, masked=[int(rng.integers(R))])
        output, state = run(rng.normal(size=(R, V)).astype(np.float32), packed, wanted, state)
        tokens = np.asarray(output.token_ids)[[p is not None for p in params]]
        assert ((tokens >= 0) & (tokens < V)).all()
    assert run._cache_size() == compiled


@pytest.mark.parametrize(
    "features, params",
    [
        (Feature.NONE, GREEDY),
        (Feature.TOP_K, SamplingParams(top_k=20, top_p=0.9)),
        (Feature.RANDOM, SamplingParams(min_p=0.01)),
        (Feature.TOP_P, SamplingParams(top_p=0.8)),
        (Feature.LARGE_TOP_K | Feature.TOP_P, SamplingParams(top_k=90, top_p=0.8)),
        (Feature.PENALTY, SamplingParams(temperature=0, repetition_penalty=1.3)),
        (Feature.LOGPROBS, SamplingParams(temperature=0, logprobs=2)),
    ],
)
def test_programs_with_fewer_features_agree_with_the_whole(features, params):
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(R, V)) * 2).astype(np.float32)
    state = random_state(rng)
    packed, wanted = pack([params] * R)
    assert wanted == features
    whole, whole_state = run(logits, packed, wanted, state)
    part, part_state = run(logits, packed, wanted, state, features=features)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part)):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole_state.last_token_ids, part_state.last_token_ids)
    expected = whole_state if features & Feature.PENALTY else state
    np.testing.assert_array_equal(part_state.history, expected.history)


@pytest.mark.parametrize("features", [Feature.NONE, Feature.TOP_K, Feature.RANDOM])
def test_programs_of_one_feature_have_no_branch_and_no_loop(features):
    packed, wanted = pack([GREEDY], size=2)
    state = SamplerState.create(S, V)
    compiled = run.lower(np.zeros((2, V), np.float32), packed, wanted, state, features=features).compile()
    text = compiled.as_text()
    assert " conditional(" not in text
    assert " while(" not in text


def test_the_state_is_updated_in_place():
    """Donated, no part of the state is copied: the history alone may be hundreds of megabytes."""
    state = SamplerState.create(40, 301)
    packed = jnp.zeros((8, NUM_COLUMNS), jnp.int32)

    def step(logits, packed, wanted, state):
        return sample(logits, SamplingMetadata.from_packed(packed, wanted), state, max_logprobs=4)

    lowered = jax.jit(step, donate_argnums=3).lower(jnp.zeros((8, 301)), packed, jnp.int32(0), state)
    lines = lowered.compile().as_text().splitlines()
    assert any("u16[40,301]" in line for line in lines)
    assert not [line for line in lines if " copy(" in line and ("u16[40,301]" in line or "[40,1024]" in line)]


def test_vocabularies_beyond_the_limit_are_refused():
    size = 2**20 + 1
    logits = jax.ShapeDtypeStruct((1, size), jnp.float32)
    packed = jax.ShapeDtypeStruct((1, NUM_COLUMNS), jnp.int32)
    state = jax.eval_shape(functools.partial(SamplerState.create, 1, size))
    with pytest.raises(ValueError, match=str(size)):
        jax.eval_shape(run, logits, packed, jax.ShapeDtypeStruct((), jnp.int32), state)


def test_threefry_is_the_one_of_jax():
    words = np.random.default_rng(0).integers(0, 2**32, (4, 20), np.uint64).astype(np.uint32)
    first, second = threefry2x32((words[0], words[1]), (words[2], words[3]))
    for column in range(20):
        expected = threefry_2x32(jnp.asarray(words[:2, column]), jnp.asarray(words[2:, column]))
        np.testing.assert_array_equal(expected, [first[column], second[column]])

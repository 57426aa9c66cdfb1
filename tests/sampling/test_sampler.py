"""sample(): the whole of it, on one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import SamplerState
from jaxserve.sampling.token_mask import pack_mask
from jaxserve.sampling_params import SamplingParams

pytestmark = pytest.mark.device

S = 70
GREEDY = SamplingParams(temperature=0)


@functools.partial(jax.jit, static_argnames=("features", "max_logprobs"))
def run(logits, packed, wanted, state, features=ALL_FEATURES, max_logprobs=4):
    metadata = SamplingMetadata.from_packed(packed, wanted)
    return sample(logits, metadata, state, max_logprobs=max_logprobs, features=features)


def pack(params, seeds=None, positions=None, rows=None, masked=()):
    """A step's rows; ``None`` among the parameters is a padding row."""
    table = make_table(S)
    rows = range(len(params)) if rows is None else rows
    for place, (row, row_params) in enumerate(zip(rows, params)):
        if row_params is not None:
            write_row(table, row, row_params, place if seeds is None else seeds[place])
            set_masked(table, row, place in masked)
    packed = table[[S if p is None else row for row, p in zip(rows, params)]]
    packed[:, COLUMN["positions"]] = 0 if positions is None else positions
    return packed, np.int32(step_features(packed))


def draw(logits, params, seeds, positions=None, state=None, features=ALL_FEATURES):
    packed, wanted = pack(params, seeds, positions)
    state = SamplerState.create(S, logits.shape[1]) if state is None else state
    return np.asarray(run(jnp.asarray(logits), packed, wanted, state, features)[0].token_ids)


# --- what is sampled
# -------------------------------------------------------------------------------------------


def distribution(logits, params):
    """Exact probabilities of one row by vLLM's definitions, in float64 (top-k ties kept)."""
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
    if freedom == 0:
        return 0.0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=7),
        SamplingParams(top_k=100),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=1.5, top_k=120, top_p=0.8, min_p=0.01),
    ],
    ids=repr,
)
def test_frequencies_match_the_distribution(params):
    """Fixed seeds, so it passes always or never; 6 standard deviations would be a chance of about 1 in
    10**6.
    """
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=300) * 2).astype(np.float32)
    expected = distribution(logits, params)
    counts = np.zeros(300)
    for position in range(100):
        tokens = draw(np.tile(logits, (64, 1)), [params] * 64, range(64), position)
        counts += np.bincount(tokens, minlength=300)
    assert not counts[expected == 0].any()
    assert chi_square(counts, expected * counts.sum()) < 6


def test_positions_and_seeds_give_independent_numbers():
    """Pairs of neighbouring positions, and of neighbouring seeds, fall evenly on a 4 x 4 grid."""
    logits = np.zeros((64, 4), np.float32)
    tokens = np.stack([draw(logits, [SamplingParams()] * 64, range(64), position) for position in range(100)])
    for first, second in ((tokens[:-1], tokens[1:]), (tokens[:, :-1], tokens[:, 1:])):
        counts = np.bincount((first * 4 + second).ravel(), minlength=16)
        assert chi_square(counts, np.full(16, counts.sum() / 16)) < 6


def test_all_64_bits_of_a_seed_count():
    logits = np.zeros((64, 1000), np.float32)
    seeds = [1 << bit for bit in range(64)]
    assert len(set(draw(logits, [SamplingParams()] * 64, seeds))) > 55


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.01, 0.1, 1.0, 2.0]), st.floats(0.1, 30))
def test_only_possible_tokens_are_sampled(seed, temperature, spread):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(64, 300)) * spread).astype(np.float32)
    logits[:, rng.random(300) < 0.5] = -np.inf
    logits[:, rng.random(300) < 0.1] = np.nan
    logits[:, 7] = 0
    params = [
        SamplingParams(
            temperature=temperature,
            top_k=int(rng.choice([0, 2, 40, 64, 65, 200])),
            top_p=float(rng.choice([1.0, 0.9, 0.3, 1e-6])),
            min_p=float(rng.choice([0.0, 0.1, 1.0])),
        )
        for _ in range(64)
    ]
    tokens = draw(logits, params, rng.integers(0, 2**62, 64))
    assert np.isfinite(logits[np.arange(64), tokens]).all()


def test_narrow_filters_leave_the_most_likely_token():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(64, 300)) * 3).astype(np.float32)
    for params in (
        SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0), SamplingParams(temperature=0),
        SamplingParams(top_k=5, top_p=1e-9), SamplingParams(top_k=99, top_p=1e-9), SamplingParams(temperature=1e-4),
        SamplingParams(top_k=5, min_p=1.0),
    ):  # fmt: skip
        np.testing.assert_array_equal(draw(logits, [params] * 64, range(64)), logits.argmax(-1))


def test_extreme_tokens_are_reachable():
    """The first and the last token of a row, alone or with all of the probability between them."""
    for size in (1, 64, 65, 300):
        logits = np.full((64, size), -np.inf, np.float32)
        logits[:, 0] = logits[:, -1] = 3
        for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.9)):
            assert set(draw(logits, [params] * 64, range(64))) == {0, size - 1}


def test_rare_tokens_keep_their_proportions():
    """Tokens far below the maximum: a chunk's tokens are weighed against each other, not against the
    maximum.
    """
    logits = np.full((64, 192), -18.0, np.float32)
    logits[:, 64:128] = np.log(np.arange(1, 65)) - 18
    params = [SamplingParams(temperature=1.0)] * 64
    counts = sum(np.bincount(draw(logits, params, range(64), i), minlength=192) for i in range(60))
    expected = np.exp(logits[0] - logits[0].max())
    assert chi_square(counts, expected / expected.sum() * counts.sum()) < 6


def test_rows_without_a_token_say_so():
    logits = np.zeros((6, 80), np.float32)
    logits[:3] = np.nan
    logits[3:5] = -np.inf
    params = [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_k=3),
        GREEDY,
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=2),
    ]
    packed, wanted = pack(params)
    output, state = run(logits, packed, wanted, SamplerState.create(S, 80))
    np.testing.assert_array_equal(output.token_ids[:5], -1)
    assert int(output.token_ids[5]) >= 0
    np.testing.assert_array_equal(state.last_token_ids[:5], 0)
    masked, wanted = pack([SamplingParams()] * 2, masked=[0])  # nothing allowed
    output, _ = run(logits[[5, 5]], masked, wanted, SamplerState.create(S, 80))
    assert int(output.token_ids[0]) == -1
    assert int(output.token_ids[1]) >= 0


# --- state, and what travels with a row
# ------------------------------------------------------------------------


def test_penalties_and_masks_follow_the_rows_through_steps():
    """Six steps of four rows against a plain loop: every token of a row is penalised out of being
    repeated.
    """
    size = 100
    rng = np.random.default_rng(1)
    no_repeat = SamplingParams(temperature=0, frequency_penalty=2, presence_penalty=2)
    params = [no_repeat, GREEDY, no_repeat, SamplingParams(temperature=0, logit_bias={5: 100.0})]
    rows = [3, 0, 69, 10]
    state = SamplerState.create(S, size)
    bias_ids = np.zeros_like(state.bias_ids)
    bias_ids[10, 0] = 5
    bias_values = np.zeros_like(state.bias_values)
    bias_values[10, 0] = 100
    mask = np.array(state.token_mask)
    mask[69] = pack_mask(np.arange(size) >= 50)
    state = SamplerState(
        state.last_token_ids,
        state.history,
        jnp.asarray(mask),
        jnp.asarray(bias_ids),
        jnp.asarray(bias_values),
    )
    logits = (rng.random((4, size)) * 1.5).astype(np.float32)
    counts = np.zeros((4, size))
    for step in range(6):
        order = rng.permutation(4)
        packed, wanted = pack(
            [params[i] for i in order] + [None] * 3, rows=[rows[i] for i in order] + [0] * 3, positions=step,
            masked=[list(order).index(2)],
        )  # fmt: skip
        batch = np.concatenate([logits[order], np.full((3, size), np.nan, np.float32)])
        output, state = run(batch, packed, wanted, state)
        for place, i in enumerate(order):
            scores = logits[i].astype(np.float64)
            scores = np.where(np.arange(size) >= 50, scores, -np.inf) if i == 2 else scores
            scores = scores - (2 * counts[i] + 2 * (counts[i] > 0) if params[i] is no_repeat else 0)
            scores[5] += 100 if i == 3 else 0
            assert int(output.token_ids[place]) == scores.argmax()
            assert int(state.last_token_ids[rows[i]]) == scores.argmax()
            counts[i, scores.argmax()] += 1
    for i in range(4):
        np.testing.assert_array_equal(state.history[rows[i]], counts[i])


def test_padding_rows_change_nothing():
    state = SamplerState.create(S, 90)
    state = jax.tree.map(
        lambda leaf: leaf.at[:].set(jnp.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype)), state
    )
    for value in (np.nan, np.inf, -np.inf, 3e38):
        packed, wanted = pack([None] * 8)
        _, new = run(np.full((8, 90), value, np.float32), packed, wanted | ALL_FEATURES, state)
        for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new)):
            np.testing.assert_array_equal(before, after)


def test_logprobs_are_of_the_raw_logits():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(3, 90)).astype(np.float32)
    params = [
        SamplingParams(temperature=0.5, logprobs=2),
        SamplingParams(temperature=0, logit_bias={4: 100.0}, logprobs=0),
        SamplingParams(temperature=0),
    ]
    state = SamplerState.create(S, 90)
    state = SamplerState(**{**vars(state), "bias_ids": state.bias_ids.at[1, 0].set(4)})
    state = SamplerState(**{**vars(state), "bias_values": state.bias_values.at[1, 0].set(100.0)})
    packed, wanted = pack(params)
    output, _ = run(logits, packed, wanted, state)
    tokens = np.asarray(output.token_ids)
    assert tokens[1] == 4
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(output.logprobs.token_logprobs, exact[np.arange(3), tokens], atol=1e-5)
    np.testing.assert_array_equal(output.logprobs.top_ids, np.argsort(-logits, -1)[:, :4])
    assert output.logprobs.top_logprobs.shape == (3, 4)
    packed, wanted = pack([GREEDY])
    output, _ = run(logits[:1], packed, wanted, state)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(output.logprobs))


# --- one program, and the same answer in any company
# -----------------------------------------------------------


def mixed_params(rng):
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
        top_k=int(rng.choice([0, 0, 1, 5, 64, 65, 500])),
        top_p=float(rng.choice([1.0, 0.95, 0.5])),
        min_p=float(rng.choice([0.0, 0.0, 0.02])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.2])),
        presence_penalty=float(rng.choice([0.0, 0.0, 0.7])),
        logprobs=int(rng.choice([0, 3])) if rng.random() < 0.3 else None,
    )


def random_state(rng, size):
    state = SamplerState.create(S, size)
    history = rng.choice([0, 0, 0, 1, 3, 0x8000, 0x8002], (S, size)).astype(np.uint16)
    words = np.stack([pack_mask(rng.random(size) < 0.7) for _ in range(S)])
    return SamplerState(**{**vars(state), "history": jnp.asarray(history), "token_mask": jnp.asarray(words)})


@pytest.mark.parametrize("size", [1003, 4096])
def test_rows_do_not_depend_on_their_company(size):
    """The same rows alone, in pairs, and among 64, in any order: the same tokens and logprobs, bit for
    bit.
    """
    rng = np.random.default_rng(size)
    state = random_state(rng, size)
    logits = (rng.normal(size=(64, size)) * 3).astype(np.float32)
    params = [mixed_params(rng) for _ in range(64)]
    packed, _ = pack(
        params, seeds=rng.integers(0, 2**62, 64), positions=rng.integers(0, 1000, 64), masked=range(0, 64, 3)
    )

    def outcome(rows):
        wanted = np.int32(step_features(packed[rows]) | Feature.LOGPROBS)
        output, _ = run(logits[rows], packed[rows], wanted, state)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(output)]
        return {row: tuple(leaf[place].tobytes() for leaf in leaves) for place, row in enumerate(rows)}

    everyone = outcome(np.arange(64))
    for num_rows in (1, 2, 3, 8, 33):
        for _ in range(4):
            for row, result in outcome(rng.permutation(64)[:num_rows]).items():
                assert result == everyone[row]


def test_one_compilation_serves_every_mix():
    rng = np.random.default_rng(0)
    state = random_state(rng, 130)
    before = run._cache_size()
    for step in range(30):
        params = [None if rng.random() < 0.3 else mixed_params(rng) for _ in range(9)]
        packed, wanted = pack(params, positions=step, masked=[int(rng.integers(9))])
        logits = rng.normal(size=(9, 130)).astype(np.float32)
        output, state = run(jnp.asarray(logits), packed, wanted, state)
        for place, row_params in enumerate(params):
            if row_params is not None:
                assert 0 <= int(output.token_ids[place]) < 130
    assert run._cache_size() == before + 1


def test_programs_with_fewer_features_agree_with_the_whole():
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(16, 700)) * 2).astype(np.float32)
    cases = {
        Feature.NONE: SamplingParams(temperature=0),
        Feature.TOP_K: SamplingParams(top_k=20, top_p=0.9),
        Feature.RANDOM: SamplingParams(min_p=0.01),
        Feature.RANDOM | Feature.FILTER: SamplingParams(top_p=0.8),
        Feature.PENALTY: SamplingParams(temperature=0, repetition_penalty=1.3),
        Feature.LOGPROBS: SamplingParams(temperature=0, logprobs=2),
    }
    state = random_state(rng, 700)
    for features, params in cases.items():
        packed, wanted = pack([params] * 16)
        assert wanted == features
        whole, whole_state = run(logits, packed, wanted, state)
        part, part_state = run(logits, packed, wanted, state, features=features)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part)):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(whole_state.last_token_ids, part_state.last_token_ids)
        if features & Feature.PENALTY:
            np.testing.assert_array_equal(whole_state.history, part_state.history)


def test_the_greedy_program_has_no_branch_and_leaves_counts_alone():
    def step(logits, packed, wanted, state):
        metadata = SamplingMetadata.from_packed(packed, wanted)
        return sample(logits, metadata, state, max_logprobs=4, greedy_only=True)

    state = random_state(np.random.default_rng(0), 90)
    packed, wanted = pack([GREEDY] * 3)
    compiled = jax.jit(step).lower(np.zeros((3, 90), np.float32), packed, wanted, state).compile()
    assert "conditional(" not in compiled.as_text()
    _, new = compiled(np.zeros((3, 90), np.float32), packed, wanted, state)
    np.testing.assert_array_equal(new.history, state.history)


def test_the_state_is_updated_in_place():
    """Donated, no part of the state is copied: the history alone may be hundreds of megabytes."""
    state = SamplerState.create(40, 3001)
    packed, wanted = jnp.zeros((8, NUM_COLUMNS), jnp.int32), jnp.int32(0)

    def step(logits, packed, wanted, state):
        return sample(logits, SamplingMetadata.from_packed(packed, wanted), state, max_logprobs=4)

    lowered = jax.jit(step, donate_argnums=3).lower(jnp.zeros((8, 3001)), packed, wanted, state)
    text = lowered.compile().as_text()
    copies = [
        line
        for line in text.splitlines()
        if " copy(" in line and ("u16[40,3001]" in line or "[40,1024]" in line)
    ]
    assert not copies


def test_vocabularies_beyond_the_limit_are_refused():
    logits = jax.ShapeDtypeStruct((1, 2**20 + 1), jnp.float32)
    packed = jax.ShapeDtypeStruct((1, NUM_COLUMNS), jnp.int32)
    state = jax.eval_shape(functools.partial(SamplerState.create, 1, 2**20 + 1))
    with pytest.raises(ValueError, match="1048577"):
        jax.eval_shape(run, logits, packed, jax.ShapeDtypeStruct((), jnp.int32), state)

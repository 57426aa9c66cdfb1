"""Token masks on the host, against a plain restatement of what is allowed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sampling.token_mask import TokenMaskBuilder, mask_words, pack_mask, unpack_mask
from jaxserve.sampling_params import SamplingParams

V = 70
IDS = st.integers(0, V - 1)


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_packing_round_trip(size, seed):
    allowed = np.random.default_rng(seed).random(size) < 0.5
    words = pack_mask(allowed)
    assert words.dtype == np.int32
    assert words.shape == (mask_words(size),)
    np.testing.assert_array_equal(unpack_mask(words, size), allowed)
    for token in range(size):
        assert bool(words.view(np.uint32)[token // 32] >> (token % 32) & 1) == allowed[token]


def expected_mask(allowed, bad_words, stops, min_tokens, outputs):
    base = set(range(V)) if allowed is None else set(allowed)
    early = set(stops) if len(outputs) < min_tokens else set()
    bad = {
        word[-1] for word in bad_words if word and outputs[len(outputs) - len(word) + 1 :] == list(word[:-1])
        and len(outputs) >= len(word) - 1
    }  # fmt: skip
    for banned in (bad | early, early, set()):
        if base - banned:
            return base - banned
    return base


@given(
    allowed=st.none() | st.lists(IDS, min_size=1, max_size=4),
    bad_words=st.lists(st.lists(st.integers(0, 3) | IDS, min_size=1, max_size=4), max_size=6),
    stops=st.lists(IDS, max_size=3),
    min_tokens=st.integers(0, 4),
    outputs=st.lists(st.integers(0, 3), max_size=6),
)
def test_bits_match_the_definition(allowed, bad_words, stops, min_tokens, outputs):
    builder = TokenMaskBuilder(
        V,
        allowed_token_ids=allowed,
        bad_words_token_ids=bad_words,
        stop_token_ids=stops,
        min_tokens=min_tokens,
    )
    last = object()
    for length in range(len(outputs) + 1):
        so_far = outputs[:length]
        changed = builder.needs_update(length, so_far)
        words = builder.bits(length, so_far)
        mask = np.ones(V, bool) if words is None else unpack_mask(words, V)
        assert set(np.flatnonzero(mask)) == expected_mask(allowed, bad_words, stops, min_tokens, so_far)
        if words is not None:
            assert not unpack_mask(words, 96)[V:].any()
        if not changed:
            assert mask.tobytes() == last
        assert not builder.needs_update(length, so_far)
        last = mask.tobytes()


def test_only_longer_bad_words_depend_on_tokens():
    assert not TokenMaskBuilder(
        V, allowed_token_ids=[1], bad_words_token_ids=[[2]], min_tokens=3
    ).depends_on_tokens
    builder = TokenMaskBuilder(V, bad_words_token_ids=[[4, 5, 6], [5, 7]])
    assert builder.depends_on_tokens
    assert builder.bits(0, []) is None
    assert set(np.flatnonzero(~unpack_mask(builder.bits(3, [1, 4, 5]), V))) == {6, 7}
    assert builder.needs_update(4, [1, 4, 5, 6])
    assert not TokenMaskBuilder(V, bad_words_token_ids=[[4, V]]).depends_on_tokens  # it cannot be completed


def test_min_tokens_needs_two_masks_only():
    builder = TokenMaskBuilder(V, stop_token_ids=[2, 3, 34], min_tokens=3)
    updates = []
    for count in range(6):
        if builder.needs_update(count):
            words = builder.bits(count)
            updates.append((count, None if words is None else set(np.flatnonzero(~unpack_mask(words, V)))))
    assert updates == [(0, {2, 3, 34}), (3, None)]


def test_ids_outside_the_vocabulary_are_ignored_and_an_unknown_allow_list_allows_nothing():
    builder = TokenMaskBuilder(V, bad_words_token_ids=[[V], [-1]], stop_token_ids=[V + 5], min_tokens=2)
    assert builder.bits(0) is None
    assert not TokenMaskBuilder(V, allowed_token_ids=[V]).bits(0).any()


def test_returned_masks_are_the_callers():
    builder = TokenMaskBuilder(V, allowed_token_ids=[1, 2])
    builder.bits(0)[:] = 0
    assert set(np.flatnonzero(unpack_mask(builder.bits(1), V))) == {1, 2}


@pytest.mark.parametrize(
    "params, bad_words, needed",
    [
        (SamplingParams(), [], False),
        (SamplingParams(min_tokens=1), [], True),
        (SamplingParams(allowed_token_ids=[1]), [], True),
        (SamplingParams(bad_words=["x"]), [[5]], True),
    ],
)
def test_create_builds_only_what_is_needed(params, bad_words, needed):
    assert (TokenMaskBuilder.create(params, V, [0], bad_words) is not None) == needed


def test_create_passes_everything_on():
    params = SamplingParams(min_tokens=1, allowed_token_ids=[0, 1, 2, 3])
    builder = TokenMaskBuilder.create(params, V, [0], [[3]])
    assert set(np.flatnonzero(unpack_mask(builder.bits(0), V))) == {1, 2}
    assert set(np.flatnonzero(unpack_mask(builder.bits(1), V))) == {0, 1, 2}


@given(
    st.sets(IDS, min_size=1),
    st.none() | st.sets(IDS, min_size=1),
    st.lists(st.lists(IDS, min_size=1, max_size=1)),
    st.sets(IDS),
    st.integers(0, 2),
)
def test_a_grammars_mask_never_gives_way(grammar, allowed, bad_words, stops, min_tokens):
    builder = TokenMaskBuilder(
        V,
        allowed_token_ids=allowed,
        bad_words_token_ids=bad_words,
        stop_token_ids=stops,
        min_tokens=min_tokens,
    )
    within = pack_mask(np.isin(np.arange(V), list(grammar)))
    before = within.copy()
    found = builder.bits(1, (), within)
    np.testing.assert_array_equal(within, before)
    left = grammar if allowed is None else grammar & allowed
    early = stops if min_tokens > 1 else set()
    bad = {word[0] for word in bad_words}
    expected = (left - bad - early) or (left - early) or left
    assert set(np.flatnonzero(unpack_mask(found, V))) == expected

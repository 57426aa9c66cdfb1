"""The packed table: what the host writes is what the device reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.metadata import (
    ALL_FEATURES,
    COLUMN,
    COLUMNS,
    MAX_TOP,
    NUM_COLUMNS,
    Feature,
    SamplingMetadata,
    features_of,
    make_table,
    set_masked,
    step_features,
    write_row,
)
from jaxserve.sampling_params import SamplingParams

pytestmark = pytest.mark.device

FULL = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=17,
    min_p=0.125,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    logit_bias={3: 1.0, 9: -2.0},
    logprobs=4,
)


def unpack(packed):
    return SamplingMetadata.from_packed(jnp.asarray(packed), jnp.int32(int(step_features(packed))))


def test_every_column_can_be_read():
    metadata = unpack(make_table(2))
    for column in COLUMNS:
        values = getattr(metadata, column.name)
        assert values.shape == (3,)
        assert values.dtype == column.dtype


def test_every_parameter_arrives():
    table = make_table(4)
    write_row(table, 2, FULL, seed=(7 << 32) | 5)
    packed = table[[2]]
    packed[:, COLUMN["positions"]] = 11
    metadata = unpack(packed)
    expected = {
        "row_ids": 2, "positions": 11, "seed_lo": 5, "seed_hi": 7, "temperature": np.float32(0.7), "top_k": 17,
        "top_p": np.float32(0.9), "min_p": 0.125, "presence_penalty": -0.5, "frequency_penalty": 1.5,
        "repetition_penalty": 1.25, "num_bias": 2, "use_mask": 0,
        "features": int(Feature.PENALTY | Feature.BIAS | Feature.TOP_K | Feature.LOGPROBS),
    }  # fmt: skip
    assert {name: getattr(metadata, name)[0].item() for name in expected} == pytest.approx(expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(metadata)] == [np.int32, np.int32]


@pytest.mark.parametrize("seed", [0, 1, -2, 2**63 - 1, -(2**63), 2**64 + 3])
def test_seed_keeps_its_low_64_bits(seed):
    table = make_table(1)
    write_row(table, 0, SamplingParams(), seed)
    metadata = unpack(table[:1])
    assert int(metadata.seed_lo[0]) | int(metadata.seed_hi[0]) << 32 == seed % 2**64


def test_a_row_written_again_keeps_nothing():
    table, fresh = make_table(2), make_table(2)
    write_row(table, 1, FULL, seed=2**40)
    set_masked(table, 1, True)
    write_row(table, 1, SamplingParams(temperature=0), seed=3)
    write_row(fresh, 1, SamplingParams(temperature=0), seed=3)
    np.testing.assert_array_equal(table, fresh)


def test_padding_row_is_greedy_and_asks_for_nothing():
    table = make_table(3)
    for row in range(3):
        write_row(table, row, FULL, seed=1)
    metadata = unpack(table[[3]])
    assert int(metadata.row_ids[0]) == 3
    assert int(metadata.features[0]) == 0
    assert float(metadata.temperature[0]) == 0
    assert step_features(table[[3]]) == Feature.NONE


@pytest.mark.parametrize("row", [-1, 3, 4])
def test_rows_outside_the_table_are_refused(row):
    with pytest.raises(ValueError, match="row must be in"):
        write_row(make_table(3), row, SamplingParams(), 0)


@pytest.mark.parametrize(
    "params, expected",
    [
        (SamplingParams(temperature=0), Feature.NONE),
        (SamplingParams(), Feature.RANDOM),
        (SamplingParams(min_p=0.1), Feature.RANDOM),
        (SamplingParams(top_p=0.9), Feature.TOP_P),
        (SamplingParams(top_k=100, top_p=0.9), Feature.LARGE_TOP_K | Feature.TOP_P),
        (SamplingParams(top_k=2, top_p=0.9), Feature.TOP_K),
        (SamplingParams(top_k=MAX_TOP), Feature.TOP_K),
        (SamplingParams(top_k=MAX_TOP + 1), Feature.LARGE_TOP_K),
        (SamplingParams(temperature=0, top_k=5, top_p=0.5), Feature.NONE),
        (SamplingParams(top_k=1), Feature.NONE),
        (SamplingParams(temperature=0, repetition_penalty=0.9), Feature.PENALTY),
        (SamplingParams(temperature=0, presence_penalty=0.1), Feature.PENALTY),
        (SamplingParams(temperature=0, frequency_penalty=0.1), Feature.PENALTY),
        (SamplingParams(temperature=0, logit_bias={1: 1}), Feature.BIAS),
        (SamplingParams(temperature=0, logprobs=0), Feature.LOGPROBS),
    ],
)
def test_features(params, expected):
    assert features_of(params) == expected


def test_step_features_are_the_union_and_masks_switch():
    table = make_table(3)
    write_row(table, 0, SamplingParams(temperature=0, logprobs=1), 0)
    write_row(table, 1, SamplingParams(temperature=0, logit_bias={1: 1}), 0)
    set_masked(table, 2, True)
    assert step_features(table) == Feature.LOGPROBS | Feature.BIAS | Feature.MASK
    assert not Feature.RANDOM & step_features(table)
    set_masked(table, 2, False)
    assert step_features(table) == Feature.LOGPROBS | Feature.BIAS
    metadata = unpack(table[:2])
    assert bool(metadata.any(Feature.BIAS))
    assert not bool(metadata.any(Feature.MASK | Feature.RANDOM))
    assert bool(metadata.any(ALL_FEATURES))


def test_no_rows_ask_for_nothing():
    assert step_features(np.zeros((0, NUM_COLUMNS), np.int32)) == Feature.NONE

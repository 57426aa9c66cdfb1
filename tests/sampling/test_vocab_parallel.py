"""Sampling from logits that devices hold parts of: the same tokens and log probabilities as on one device."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.sampling.logprobs import compute_logprobs
from jaxserve.sampling.metadata import (
    ALL_FEATURES,
    Feature,
    SamplingMetadata,
    make_table,
    step_features,
    write_row,
)
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import SamplerState
from jaxserve.sampling.vocab_parallel import VocabParallel
from jaxserve.sampling_params import SamplingParams
from sharding import make_mesh

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)"),
]

DEVICES, VOCAB, PADDED = 4, 1021, 1024
WHOLE, SPLIT = PartitionSpec(), PartitionSpec(None, "model")
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, logprobs=2),
    SamplingParams(temperature=0.7, top_k=5, repetition_penalty=1.5),
    SamplingParams(temperature=1.2, top_p=0.8, logit_bias={3: 4.0}),
    SamplingParams(temperature=0.9, top_k=200, min_p=0.01, presence_penalty=0.5),
]


def metadata(num_rows: int, params: list[SamplingParams]) -> SamplingMetadata:
    table = make_table(8)
    for row, each in enumerate(params):
        write_row(table, row, each, seed=17 * row)
    packed = table[[row if row < len(params) else 8 for row in range(num_rows)]]
    return SamplingMetadata(jnp.asarray(packed), jnp.int32(step_features(packed)))


def on_devices(function, in_specs, out_specs=WHOLE):
    mesh = make_mesh(DEVICES)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


SHARDS = VocabParallel(VOCAB, DEVICES, "model")


def logits_of(num_rows: int) -> np.ndarray:
    """With padding columns that would win, and equal maxima on different devices."""
    logits = np.random.default_rng(num_rows).normal(0, 3, (num_rows, PADDED)).astype(np.float32)
    logits[:, VOCAB:] = 99.0
    logits[0, [7, 700]] = 30.0
    return logits


@pytest.mark.parametrize("num_rows, features", [(1, Feature.NONE), (6, Feature.NONE), (6, ALL_FEATURES)])
def test_as_on_one_device(num_rows: int, features: Feature):
    params = PARAMS if features else [PARAMS[0]] * num_rows
    logits, rows, state = logits_of(num_rows), metadata(num_rows, params), SamplerState.create(8, VOCAB)
    expected = sample(logits[:, :VOCAB], rows, state, max_logprobs=4, features=features)
    step = functools.partial(SHARDS.sample, max_logprobs=4, features=features)
    found = on_devices(step, (SPLIT, WHOLE, WHOLE))(logits, rows, state)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert int(found[0].token_ids[0]) == 7


def test_logprobs_of_prompts():
    logits, ids = logits_of(5), jnp.asarray([7, 3, 1020, 0, 512])
    expected = compute_logprobs(jnp.asarray(logits[:, :VOCAB]), ids, 4)
    found = on_devices(functools.partial(SHARDS.logprobs, num_top=4), (SPLIT, WHOLE))(logits, ids)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("features", [Feature.NONE, Feature.TOP_K])
def test_no_device_gathers_all_logits(features: Feature):
    """[16, V] lies on four devices: none of them ever holds more than a quarter of it, whichever way it is cut."""
    rows = 16
    step = functools.partial(SHARDS.sample, max_logprobs=4, features=features)
    state = SamplerState.create(8, VOCAB)
    lowered = on_devices(step, (SPLIT, WHOLE, WHOLE)).lower(logits_of(rows), metadata(rows, []), state)
    text = lowered.compile().as_text()
    sizes = [
        int(np.prod([int(n) for n in shape.split(",")])) for shape in re.findall(r"f32\[([\d,]+)\]", text)
    ]
    assert max(sizes) <= 4 * 1024 * 2  # the sampler works on chunks, which round the vocabulary up
    assert ("all-to-all" in text) == (features != Feature.NONE)

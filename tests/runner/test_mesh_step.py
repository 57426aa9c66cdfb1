"""A whole step over a mesh: what the devices exchange, and nothing more; the donated caches stay where they are."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from step_programs import step_programs
from tiny_checkpoints import BASE_CONFIG, LLAMA

from jaxserve.models import build
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_variants import StepVariant
from jaxserve.runner.programs import StepPrograms
from jaxserve.sampling.metadata import ALL_FEATURES, Feature
from pallas_kernels.dispatch import BlockedBackend
from sharding import make_mesh

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)"),
]

LAYERS = 3
BUCKET = Bucket(16, 16)


def programs(tensor: int, data: int) -> StepPrograms:
    backend = BlockedBackend()
    config = {**BASE_CONFIG, **LLAMA, "num_hidden_layers": LAYERS, "num_key_value_heads": 4}
    model = build(config, backend, jnp.float32, tensor, data_parallel_size=data)
    return step_programs(
        model, backend, [BUCKET], num_blocks=77, block_size=16, max_num_seqs=16, max_blocks_per_row=8,
        placement=Placement(make_mesh(tensor, data_parallel_size=data)),
    )  # fmt: skip


def collectives(text: str) -> dict[str, int]:
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return dict(collections.Counter(re.findall(rf"= [^=]*? ({kinds})\(", text)))


@pytest.mark.parametrize(
    "tensor, data, features, expected",
    [
        # A sum for the embedding and two a layer; the best token of each device, its id, and the ranks' tokens.
        (2, 2, Feature.NONE, {"all-reduce": 1 + 2 * LAYERS, "all-gather": 3}),
        (4, 1, Feature.NONE, {"all-reduce": 1 + 2 * LAYERS, "all-gather": 2}),
        (1, 4, Feature.NONE, {"all-gather": 1}),
        # Rows change hands, and what they sampled comes back: tokens and four arrays of log probabilities.
        (4, 1, ALL_FEATURES, {"all-reduce": 1 + 2 * LAYERS, "all-to-all": 1, "all-gather": 5}),
    ],
)
def test_collectives(tensor: int, data: int, features: Feature, expected: dict[str, int]):
    step = programs(tensor, data)
    text = step.lower_step(StepVariant(BUCKET, features, decode_only=True)).compile().as_text()
    assert collectives(text) == expected
    shape = re.escape(f"f32[{','.join(map(str, step.shapes.kv_cache_shapes[0]))}]")
    assert re.search(shape, text)
    assert not re.findall(rf"= {shape}\S* copy\(.*", text)

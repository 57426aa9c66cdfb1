"""The donated caches go through a whole compiled step in place: aliased to the results, never copied."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest
from step_programs import step_programs
from tiny_checkpoints import BASE_CONFIG, LLAMA

from jaxserve.models import build
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.program_variants import StepVariant
from jaxserve.sampling.metadata import Feature
from pallas_kernels.dispatch import BlockedBackend

pytestmark = pytest.mark.device

NUM_BLOCKS, BLOCK_SIZE, ROWS = 77, 16, 8


@pytest.mark.parametrize("num_tokens", [1, 16, 128])
def test_a_cpu_step_copies_no_cache(num_tokens):
    backend = BlockedBackend()
    model = build({**BASE_CONFIG, **LLAMA}, backend, jnp.float32, weight_first=True)
    bucket = Bucket(num_tokens, min(num_tokens, ROWS))
    programs = step_programs(
        model, backend, [bucket], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=ROWS,
        max_blocks_per_row=16,
    )  # fmt: skip
    cache = programs.shapes.kv_cache_shapes
    text = programs.lower_step(StepVariant(bucket, Feature.NONE)).compile().as_text()
    shape = re.escape(f"f32[{','.join(map(str, cache[0]))}]")
    assert not re.findall(rf"= {shape}\S* copy\(.*", text)
    (aliases,) = re.findall(r"input_output_alias=\{(.*?) \}, entry", text)
    entry = re.search(r"entry_computation_layout=\{\((.*?)\)->", text)
    assert entry is not None
    parameters = re.findall(r"\w+\[[\d,]*\]", entry[1])
    donated = {int(number) for number in re.findall(r"\((\d+), \{\}", aliases)}
    caches = {i for i, parameter in enumerate(parameters) if re.fullmatch(shape, parameter)}
    assert len(caches) == len(cache)
    assert caches <= donated

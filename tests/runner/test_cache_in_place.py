"""The donated caches go through a whole compiled step in place: aliased to the results, never copied."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from tiny_checkpoints import BASE_CONFIG, LLAMA

from jaxserve.models import build
from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.buckets import BucketTable
from jaxserve.runner.programs import ProgramShapes
from jaxserve.runner.step_program import run_step
from jaxserve.sampling.metadata import Feature
from pallas_kernels.dispatch import BlockedBackend

pytestmark = pytest.mark.device

NUM_BLOCKS, BLOCK_SIZE, ROWS = 77, 16, 8


@pytest.mark.parametrize("num_tokens", [1, 16, 128])
def test_a_cpu_step_copies_no_cache(num_tokens):
    backend = BlockedBackend()
    model = build({**BASE_CONFIG, **LLAMA}, backend, jnp.float32, weight_first=True)
    cache = [
        backend.kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, s.num_kv_heads, s.head_size)
        for s in model.kv_cache_specs()
    ]
    shapes = ProgramShapes(ROWS, model.vocab_size, 5, NUM_BLOCKS, BLOCK_SIZE, 16, tuple(cache), jnp.float32)
    layouts = BatchBuilder(BucketTable.build(128, ROWS), BLOCK_SIZE, ROWS).layouts
    layout = next(layout for bucket, layout in layouts.items() if bucket.num_tokens == num_tokens)
    step = partial(
        run_step,
        model=model,
        layout=layout,
        num_slots=NUM_BLOCKS * BLOCK_SIZE,
        max_logprobs=5,
        features=Feature.NONE,
    )
    arguments = (
        model.abstract_params(),
        shapes.abstract_state(),
        jax.ShapeDtypeStruct((layout.size,), jnp.int32),
    )
    text = jax.jit(step, donate_argnums=1).lower(*arguments).compile().as_text()
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

"""The whole step with the Hopper kernels lowers for CUDA, on a machine without a GPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models import build
from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.buckets import Bucket, BucketTable
from jaxserve.runner.programs import ProgramShapes
from jaxserve.runner.step_program import run_step
from jaxserve.sampling.metadata import ALL_FEATURES, Feature

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need jax >= 0.11"),
]

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


@pytest.mark.parametrize("name", ["llama-8b", "qwen3-0.6b"])
@pytest.mark.parametrize("num_tokens,decode_only", [(1, True), (16, True), (16, False), (64, False)])
def test_it_lowers(name, num_tokens, decode_only):
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend

    config = {**json.loads((MODELS / name / "config.json").read_text()), "num_hidden_layers": 2}
    backend = GpuBackend(num_sms=132)
    model = build(config, backend, jnp.bfloat16)
    shape = [backend.kv_cache_shape(50, 64, s.num_kv_heads, s.head_size) for s in model.kv_cache_specs()]
    shapes = ProgramShapes(16, model.vocab_size, 20, 50, 64, 32, tuple(shape), jnp.bfloat16)
    layout = BatchBuilder(BucketTable.build(64, 16), 64, 16).layouts[Bucket(num_tokens, min(num_tokens, 16))]
    step = partial(
        run_step, model=model, layout=layout, num_slots=50 * 64, max_logprobs=20,
        features=Feature.NONE if decode_only else ALL_FEATURES,
        decode_only=decode_only,
    )  # fmt: skip
    arguments = (
        model.abstract_params(),
        shapes.abstract_state(),
        jax.ShapeDtypeStruct((layout.size,), jnp.int32),
    )
    lowered = jax.jit(step, donate_argnums=(1,)).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()

"""The whole step with the Hopper kernels lowers for CUDA, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from step_programs import step_programs

from jaxserve.models import build
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_variants import StepVariant
from jaxserve.sampling.metadata import ALL_FEATURES, Feature
from sharding import make_mesh

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
    bucket = Bucket(num_tokens, min(num_tokens, 16))
    programs = step_programs(
        model, backend, [bucket], num_blocks=50, block_size=64, max_num_seqs=16, max_blocks_per_row=32
    )
    features = Feature.NONE if decode_only else ALL_FEATURES
    step, arguments = programs.step(StepVariant(bucket, features, decode_only))
    lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)")
@pytest.mark.parametrize("decode_only", [True, False])
def test_it_lowers_over_a_mesh(decode_only):
    """Two data parallel ranks of two tensor-parallel devices: the kernels see one device's heads and rows."""
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend

    config = {**json.loads((MODELS / "llama-8b" / "config.json").read_text()), "num_hidden_layers": 1}
    backend = GpuBackend(num_sms=132)
    model = build(config, backend, jnp.bfloat16, 2, data_parallel_size=2)
    bucket = Bucket(16, 16)
    programs = step_programs(
        model, backend, [bucket], num_blocks=50, block_size=64, max_num_seqs=16, max_blocks_per_row=32,
        placement=Placement(make_mesh(2, data_parallel_size=2)),
    )  # fmt: skip
    features = Feature.NONE if decode_only else ALL_FEATURES
    step, arguments = programs.step(StepVariant(bucket, features, decode_only))
    lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)")
@pytest.mark.parametrize("expert_parallel,num_tokens,calls", [(False, 16, 1), (True, 16, 1), (True, 64, 2)])
def test_experts_lower_over_a_mesh(expert_parallel, num_tokens, calls):
    """A device's share of the experts: the kernels for few tokens; or the two products of many."""
    from pallas_kernels.grouped_matmul.gpu import Config, GpuGroupedMatmul
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend

    config = {**json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text()), "num_hidden_layers": 1}
    backend = GpuBackend(num_sms=132)
    bucket = Bucket(num_tokens, 16)
    grouped = GpuGroupedMatmul(num_sms=132, config=Config((8, 16)))
    model = build(
        config, backend, jnp.bfloat16, 2, data_parallel_size=2, expert_parallel=expert_parallel,
        grouped_matmul=grouped,
    )  # fmt: skip
    programs = step_programs(
        model, backend, [bucket], num_blocks=50, block_size=64, max_num_seqs=16, max_blocks_per_row=32,
        placement=Placement(make_mesh(2, data_parallel_size=2)),
    )  # fmt: skip
    step, arguments = programs.step(StepVariant(bucket, Feature.NONE, num_tokens <= 16))
    text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged_dot" not in text
    assert text.count("call @_jitted") == calls

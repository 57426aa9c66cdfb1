"""Plans with the real TPU compiler: two topologies, a dense model and one of experts, decode programs of few layers."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.plan.hardware import find_topology
from jaxserve.plan.make_plan import CompileOptions, Plan, make_plan
from jaxserve.plan.report import render

pytest.importorskip("libtpu", reason="libtpu, the TPU's compiler, is not installed (the tpu extra)")

pytestmark = [pytest.mark.device, pytest.mark.tpu_aot, pytest.mark.timeout(1800)]

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


def plan(model: str, topology: str, **flags: Any) -> Plan:
    hf_config = json.loads((MODELS / model / "config.json").read_text())
    config = EngineConfig.from_kwargs(max_model_len=8192, **flags)
    found = make_plan(
        model, hf_config, config, find_topology(topology), options=CompileOptions("decode", num_layers=2)
    )
    print("\n" + render(found))
    assert found.fits
    more, fewer = found.programs
    assert (more.num_layers, fewer.num_layers) == (2, 1)
    assert more.temporary_bytes < 2**28
    # The caches of two layers take the results' place: nothing that large is copied.
    assert more.alias_bytes >= found.device_cache_bytes * 2 // found.num_layers
    return found


def test_dense() -> None:
    found = plan("llama-8b", "v6e-8", tensor_parallel_size=8)
    counts = {each.kind: each.count for each in found.step_collectives}
    assert counts["all-reduce"] == 2 * 32 + 1  # attention and feed-forward of each layer, the embedding
    assert "extrapolated" in found.collectives_note


def test_experts() -> None:
    found = plan(
        "qwen3-30b-a3b", "tpu7x-8", tensor_parallel_size=4, data_parallel_size=2, enable_expert_parallel=True
    )
    assert sum(each.count for each in found.step_collectives) >= 2 * 48

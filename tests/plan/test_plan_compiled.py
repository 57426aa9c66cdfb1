"""Plans with the real TPU compiler: two topologies, a dense model and one of experts, decode programs of few layers."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.plan.hardware import find_topology
from jaxserve.plan.make_plan import CompileOptions, Plan, make_plan
from jaxserve.plan.programs import Collective
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
    (program,) = found.programs
    assert program.num_layers == 2
    assert program.temporary_bytes < 2**28
    # The caches of two layers take the results' place: nothing that large is copied.
    assert program.alias_bytes >= found.device_cache_bytes * 2 // found.num_layers
    return found


def counts(collectives: Iterable[Collective] | None) -> Counter[str]:
    return Counter({each.kind: each.count for each in collectives or ()})


def test_dense() -> None:
    """Attention and feed-forward of each layer, and the embedding, whether traced or compiled."""
    found = plan("llama-8b", "v6e-8", tensor_parallel_size=8)
    assert counts(found.step_collectives)["all-reduce"] == 2 * 32 + 1
    assert counts(found.programs[0].collectives)["all-reduce"] == 2 * 2 + 1


def test_experts() -> None:
    found = plan(
        "qwen3-30b-a3b", "tpu7x-8", tensor_parallel_size=4, data_parallel_size=2, enable_expert_parallel=True
    )
    assert counts(found.step_collectives).total() >= 3 * 48
    compiled = counts(found.programs[0].collectives)
    assert 3 * 2 <= compiled.total() < 3 * 48

"""Experts get their device's grouped matmul, and what it cannot do is said when the model is built."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.layers.moe import expert_products
from jaxserve.plan.hardware import find_topology
from jaxserve.plan.planned_runner import PlannedRunner

pytestmark = pytest.mark.device
CONFIG = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-30b-a3b" / "config.json"


@pytest.mark.parametrize(
    "topology,expert_parallel,kernel,products,left",
    [
        ("h200-8", True, "mosaic_gpu", {(1536, 2048), (2048, 768)}, []),
        ("h200-8", False, "mosaic_gpu", {(192, 2048), (2048, 96)}, ["2048 x 96"]),
        ("v6e-8", False, "mosaic_tpu", {(192, 2048), (2048, 96)}, []),
    ],
)
def test_one_devices_products(
    topology: str, expert_parallel: bool, kernel: str, products: set[tuple[int, int]], left: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    hf_config = {**json.loads(CONFIG.read_text()), "num_hidden_layers": 1}
    config = EngineConfig.from_kwargs(tensor_parallel_size=8, enable_expert_parallel=expert_parallel)
    where = find_topology(topology)
    with caplog.at_level(logging.WARNING):
        runner = PlannedRunner(config.with_defaults_for(where.platform), where, hf_config, compiles=False)
    context = runner.model.context
    assert context.grouped_matmul.name == kernel
    assert expert_products(runner.model.specs.values(), runner.placement.mesh, context.rules) == products
    said = [record.getMessage() for record in caplog.records if "Experts" in record.getMessage()]
    assert len(said) == len(left)
    assert all(size in line for size, line in zip(left, said, strict=True))

"""What the compiler is told of a GPU's programs, by their kind and size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.plan.hardware import find_topology
from jaxserve.plan.planned_runner import PlannedRunner
from jaxserve.runner.placement import Placement

pytestmark = pytest.mark.device
CONFIG = Path(__file__).parents[2] / "benchmarks" / "models" / "llama-8b" / "config.json"


def test_long_steps_with_prompts_are_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        Placement, "jit", lambda self, *args, **kwargs: asked.append(dict(self.compiler_options))
    )
    config = EngineConfig.from_kwargs(max_model_len=8192).with_defaults_for("gpu")
    hf_config = {**json.loads(CONFIG.read_text()), "num_hidden_layers": 1}
    runner = PlannedRunner(config, find_topology("h200-1"), hf_config, compiles=False)
    programs = runner.programs_for(runner.num_blocks_for(1 << 30))
    launched = set[tuple[int, bool]]()
    for variant in programs.variants:
        programs.step(variant)
        if "xla_gpu_graph_min_graph_size" in asked[-1]:
            launched.add((variant.bucket.num_tokens, variant.decode_only))
    assert launched == {(size, False) for size in (512, 768, 1024, 1536, 2048, 4096, 8192)}

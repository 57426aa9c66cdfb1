"""Bursts give the tokens of single steps, in each style of programs; what rules them out says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.plan.hardware import find_topology
from jaxserve.plan.planned_runner import PlannedRunner
from jaxserve.runner.program_variants import ProgramStyle

pytestmark = pytest.mark.device

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
OPTIONS = {
    "max_model_len": 128, "max_num_seqs": 5, "max_num_batched_tokens": 32, "block_size": 16,
    "num_gpu_blocks_override": 64, "skip_tokenizer_init": True,
}  # fmt: skip
STYLES = {
    "tpu": ProgramStyle(decode_programs=True, fixed_addresses=False),
    "gpu": ProgramStyle(decode_programs=True, fixed_addresses=True),
}
GREEDY, TOP_K, ALL = {"temperature": 0.0}, {"temperature": 0.9, "top_k": 5}, {"temperature": 0.9}
BATCHES = [  # of each request its length, its tokens, how it is sampled
    [(5, 30, GREEDY), (17, 9, GREEDY), (1, 14, GREEDY)],
    [(5, 30, GREEDY), (9, 23, TOP_K), (1, 6, TOP_K), (20, 30, TOP_K), (3, 2, GREEDY)],
    [(33, 40, ALL), (9, 23, ALL), (2, 31, GREEDY)],
    [(33, 20, ALL), (9, 13, TOP_K), (2, 21, GREEDY | {"logprobs": 1})],  # never a burst
]


def answers(llm: Any) -> tuple[list[list[list[int]]], list[int]]:
    """Of each batch the tokens; and how many decode steps its dispatches had, at most."""
    runner, seen, found, most = llm._core.runner, [], [], []
    execute = runner.execute
    runner.execute = lambda step: (seen.append(step.num_decode_steps), execute(step))[1]
    for batch in BATCHES:
        prompts = [list(range(3, 3 + length)) for length, _, _ in batch]
        params = [
            SamplingParams(max_tokens=num, ignore_eos=True, detokenize=False, seed=index, **how)
            for index, (_, num, how) in enumerate(batch)
        ]
        found.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
        most.append(max(seen))
        seen.clear()
    assert runner.num_compilations() == 0
    return found, most


@pytest.mark.parametrize(
    ("style", "family", "options"),
    [
        ("gpu", "llama", {}),
        pytest.param("tpu", "llama", {}, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param("gpu", "qwen3_moe", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_tokens_of_single_steps(style, family, options, tmp_path, monkeypatch):
    model = write_tiny_checkpoint(tmp_path, family)
    monkeypatch.setattr(ProgramStyle, "of", classmethod(lambda cls, platform: STYLES[style]))
    with LLM(str(model), **OPTIONS, num_scheduler_steps=4, **options) as llm:
        found, most = answers(llm)
        llm._core.scheduler._planner.bursts = None
        expected, alone = answers(llm)
    assert (most, alone) == ([4, 4, 4, 1], [1, 1, 1, 1])
    assert found == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_scheduler_steps": 17}, "more than a block's tokens"),
        ({"num_scheduler_steps": 2, "batch_invariant": True}, "batch_invariant"),
        ({"num_scheduler_steps": 2, "data_parallel_size": 2}, "data_parallel_size 2"),
    ],
)
def test_refused(options, reason, tmp_path):
    model = write_tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=reason):
        LLM(str(model), **OPTIONS, **options)


@pytest.mark.parametrize(
    ("model", "devices", "rows"),
    [("qwen3-0.6b", 1, 32), ("llama-8b", 1, 0), ("llama-8b", 2, 32), ("qwen3-30b-a3b", 1, 1), ("qwen3-30b-a3b", 2, 8)],
)  # fmt: skip
def test_who_has_bursts_by_default(model, devices, rows):
    """On an H200: models whose steps are shorter than the host's work."""
    path = MODELS / model
    config = EngineConfig.from_kwargs(model=str(path), tensor_parallel_size=devices).with_defaults_for("gpu")
    runner = PlannedRunner(
        config,
        find_topology(f"h200-{devices}"),
        json.loads((path / "config.json").read_text()),
        compiles=False,
    )
    assert max((bucket.num_rows for bucket in runner.builder.burst_layouts), default=0) == rows

"""``bench throughput``, ``latency``, ``startup`` and ``sweep`` over a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_runner import FakeRunner
from server_process import server_process
from tiny_checkpoints import write_tiny_checkpoint

import jaxserve.engine.llm as llm_module
from jaxserve.cli import bench
from jaxserve.cli.main import main
from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore

ENGINE = ("--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_checkpoint(tmp_path_factory.mktemp("offline") / "llama"))


@pytest.fixture
def fake_device(monkeypatch):
    """LLM without a device; all else of it is real."""

    def create_core(config: EngineConfig) -> EngineCore:
        return EngineCore(config.with_defaults_for("cpu"), FakeRunner(vocab_size=320))

    monkeypatch.setattr(llm_module, "create_core", create_core)
    # Its effects on this process would disturb pytest's own handlers.
    monkeypatch.setattr(bench, "configure_logging", lambda *_: None)


def test_throughput_and_latency(fake_device, model, tmp_path, capsys):
    file = tmp_path / "result.json"
    flags = ["--model", model, "--disable-tqdm", "--output-json", str(file), *ENGINE]
    lengths = ["--input-len", "20", "--output-len", "6"]
    assert main(["bench", "throughput", "--num-prompts", "5", *lengths, *flags]) == 0
    result = json.loads(file.read_text())
    assert result.keys() >= {
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
    }
    assert (result["num_requests"], result["total_output_tokens"]) == (5, 30)
    assert result["total_num_tokens"] == 30 + result["total_prompt_tokens"]
    assert "Throughput:" in capsys.readouterr().out
    batches = ["--batch-size", "3", "--num-iters", "2", "--num-iters-warmup", "1"]
    assert main(["bench", "latency", *batches, *lengths, *flags]) == 0
    result = json.loads(file.read_text())
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


@pytest.mark.slow
@pytest.mark.device
def test_startup(model, tmp_path):
    file = tmp_path / "result.json"
    counts = ["--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1"]
    assert main(["bench", "startup", *counts, "--output-json", str(file), "--", model, *ENGINE]) == 0
    result = json.loads(file.read_text())
    assert len(result["cold_startup_times"]) == len(result["warm_startup_times"]) == 1
    assert result["avg_cold_startup_time"] > 0


@pytest.mark.slow
def test_sweep(model, tmp_path):
    options = {"engine": {"max_model_len": 512}, "runner": {"num_blocks": 500, "step_seconds": 0.005}}
    with server_process(Path(model), **options) as server:
        command = ["bench", "sweep", "--base-url", server.url, "--tokenizer", model, "--num-prompts", "4",
                   "--input-len", "5", "--output-len", "4", "--max-concurrencies", "1", "4", "--request-rates",
                   "50", "--result-dir",
                   str(tmp_path), "--result-filename", "s.json", "--label", "tiny", "--disable-tqdm"]  # fmt: skip
        assert main(command) == 0
    kept = json.loads((tmp_path / "s.json").read_text())
    assert kept["name"] == "tiny"
    assert [r["max_concurrency"] for r in kept["results"]] == [None, 1, 4]
    assert all(r["completed"] == 4 for r in kept["results"])
    assert (tmp_path / "s.html").exists()

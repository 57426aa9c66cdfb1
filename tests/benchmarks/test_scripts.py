"""The benchmark scripts run: tiny sizes, no figures judged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HEADER = "rows schedule build batch read update detokenize other total fast mean wire us/row"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("benchmarks") / "llama")


def run(script: str, *arguments: str) -> str:
    """The script's standard output."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_host(tiny_model):
    output = run("host.py", "--rows", "4", "9", "--steps", "3", "--model", str(tiny_model), "--streamed")
    lines = output.splitlines()
    assert lines[1].split() == HEADER.split()
    for line, rows in zip(lines[2:4], (4, 9)):
        cells = [float(cell) for cell in line.split()]
        assert cells[0] == rows
        assert all(cell > 0 for cell in cells[1:])
    assert re.search(r"x from 4 to 9 rows: (met|MISSED)", output)


@pytest.mark.slow
def test_host_runner():
    output = run("host_runner.py", "--rows", "2", "--steps", "3")
    names, cells = (line.split() for line in output.splitlines()[1:3])
    assert names[:3] == ["rows", "step", "fast"]
    assert len(cells) == len(names)
    assert cells[0] == "2"
    assert all(float(cell) > 0 for cell in cells)


def test_cpu_quick(tiny_model):
    output = run("cpu.py", "--quick", "--model", str(tiny_model))
    assert output.splitlines()[-2].split() == ["streams", "decode", "prefill", "single"]
    engine, *cells = re.sub(r"\(.*?\)", "", output.splitlines()[-1]).split()
    assert engine == "jaxserve"
    streams, _, prefill, _ = map(float, cells)  # the others are differences, and noise may be all of them
    assert streams > 0
    assert prefill > 0


@pytest.mark.exhaustive
def test_structured_output_quick(tiny_model):
    output = run("structured_output.py", "--quick", "--model", str(tiny_model))
    lines = output.splitlines()[1:]
    assert [line.split()[0] for line in lines[:3]] == ["json", "regex", "grammar"]
    assert all(re.search(r"constrained/free [0-9.]+ \([0-9.]+\)$", line) for line in lines[:3])
    assert lines[-1].startswith("worst")


@pytest.mark.slow
def test_streams():
    output = run("streams.py", "vanish", "--clients", "20", "--check")
    assert "MISSED" not in output
    output = run("streams.py", "streams", "--streams", "5", "--seconds", "3")
    assert re.search(r"broken streams +0 +met", output)


@pytest.fixture(scope="module")
def tiny_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a mixture of experts, and nothing else."""
    folder = tmp_path_factory.mktemp("experts")
    config = json.loads((BENCHMARKS / "models" / "qwen3-30b-a3b" / "config.json").read_text())
    config |= {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_offline(tiny_experts):
    sizes = json.dumps({"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 1024})
    output = run(
        "offline.py", "--model", str(tiny_experts), "--scale", "64", "--decode", "1,4", "--prefill", "1x512",
        "--throughput", "--steps", "--arguments", sizes, "--profile", "4,2x1024",
    )  # fmt: skip
    cases = [line for line in output.splitlines() if line[:1].isalnum()]
    assert len(cases) == 1 + 1 + 2 + 1 + 6 + 2
    assert re.search(r"4 rows: wall [1-9]", output)
    assert re.search(r"2 x 16 tokens, 4 steps: wall [1-9]", output)  # of 8 tokens each
    assert re.search(r"decode +1 .* padding +0.0%", output)
    assert re.search(r"all: [0-9.]+ s in steps, padding [0-9.]+%", output)


@pytest.mark.slow
def test_offline_against_what_another_engine_wrote(tiny_experts, tmp_path):
    written = tmp_path / "peer.json"
    sizes = json.dumps({"max_num_seqs": 2, "max_num_batched_tokens": 8})
    case = (
        "offline.py", "--model", str(tiny_experts), "--scale", "64", "--prefill", "1x512", "--arguments", sizes,
    )  # fmt: skip
    output = run(*case, "--repeats", "2", "--output", str(written))
    assert "peer" not in output
    measured = [each["value"] for each in json.loads(written.read_text()) if each["case"] == "prefill, 1 x 8"]
    assert len(measured) == 2
    [line] = [line for line in run(*case, "--peer", str(written)).splitlines() if line.startswith("prefill")]
    assert f"peer {measured[-1]:9.2f} x" in line


@pytest.mark.parametrize(
    "flag", ["--steps", "--profile=1", "--cache-plan=h200-1", "--xla-products", "--split-heads=0"]
)
def test_offline_refuses_of_another_engine_what_is_about_ours(flag):
    command = [sys.executable, str(BENCHMARKS / "offline.py"), "--engine", "vllm", "--decode", "1", flag]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{flag.split('=')[0]} is about jaxserve's engine, and vllm has another" in done.stderr


def test_offline_judges_the_last_run_and_its_peer(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import offline

    written = tmp_path / "peer.json"
    case = "decode, 8 rows"
    profile = {"case": "profile 8", "met": None}
    first, last = ({"case": case, "value": value, "unit": "ms"} for value in (4.0, 5.0))
    written.write_text(json.dumps([first, last, profile, {"case": "a share", "value": 0.5, "unit": ""}]))
    config = json.loads((BENCHMARKS / "models" / "llama-8b" / "config.json").read_text())
    benchmark = offline.Benchmark(SimpleNamespace(steps=None), "llama-8b", config, 1, written)
    benchmark.report(case, 9.0, "ms", target=4.3, peer=7.0)
    benchmark.report(case, 4.0, "ms", target=4.3, peer=7.0)
    benchmark.report("another case", 1.0, "ms", peer=7.0)
    benchmark.report("a share", 0.25, "")
    benchmark.summary()
    slow, fast, other, share, summary = capsys.readouterr().out.splitlines()
    assert re.search(r"MISSED +peer +5.00 x 1.80$", slow)
    assert re.search(r"met +peer +5.00 x 0.80$", fast)
    assert "peer" not in other + share
    assert summary == "1 of 1 targets met; missed: none"


@pytest.mark.slow
def test_serving(tiny_experts):
    output = run(
        "serving.py", "--model", str(tiny_experts), "--scale", "16", "--requests", "4", "--seconds", "1",
        "--streams", "2", "--stream-tokens", "600", "--flags", "--max-num-seqs 4 --max-num-batched-tokens 8",
    )  # fmt: skip
    judged = [line for line in output.splitlines() if re.search(r"target .* (met|MISSED)$", line)]
    assert len(judged) == 3, output


def test_startup_says_how_to_be_called():
    assert "--check" in run("startup.py", "--help")


def test_a_peer_that_is_not_installed_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu

    monkeypatch.setattr(cpu, "PEERS", {"llama.cpp": ("no_such_module", "pip install it")})
    assert cpu.run_engine("llama.cpp", cpu.Workload()) is None
    assert "pip install it" in capsys.readouterr().out


def test_targets_are_judged(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu

    def figures(value: float) -> dict[str, list[float]]:
        return {metric: [0.0, value, 99.0] for metric in cpu.METRICS}

    assert cpu.check_targets(
        {"jaxserve": figures(13.1), "transformers": figures(7.0), "llama.cpp": figures(10.0)}
    )
    assert not cpu.check_targets({"jaxserve": figures(12.9), "llama.cpp": figures(10.0)})
    output = capsys.readouterr().out
    assert output.count("met") == 5
    assert "prefill: 1.29 x llama.cpp (target 1.3 x): MISSED" in output

"""What parallel.py plans for two H200s, and how it judges what its engines found; serving.py's times of tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONS = argparse.Namespace(
    devices=2, scale=1, tokens=4, moe_layers=None, model="llama-8b", moe_model="qwen3-30b-a3b", large_model="llama-70b"
)  # fmt: skip


@pytest.fixture
def parallel(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import parallel

    return parallel


def test_every_round_fits_the_devices(parallel):
    for case in parallel.CASES:
        for runs in parallel.plan(case, OPTIONS):
            for device in range(OPTIONS.devices):
                here = [run.share for run in runs if run.devices > 1 or run.device == device]
                assert sum(here) <= parallel.MOST_SHARE, (case, [run.name for run in runs])
    shares = {run.name: run.share for runs in parallel.plan("tokens", OPTIONS) for run in runs}
    assert shares["moe float32 1"] > 0.8  # 30.5 G parameters of 4 bytes, and 4 GiB
    assert shares["moe float32 ep"] == pytest.approx(
        (30.53e9 * 2 + parallel.WORKSPACE) / parallel.MEMORY, rel=0.01
    )


def test_copies_of_kv_heads_are_not_compared(parallel):
    with pytest.raises(ValueError, match="qwen3-30b-a3b has 4 KV heads"):
        parallel.plan("tokens", argparse.Namespace(**{**vars(OPTIONS), "devices": 8}))


def answers(tokens, first):
    return {"tokens": tokens, "first": [{"7": first}] * len(tokens)}


def test_tokens_are_judged(parallel, capsys):
    base = answers([[1, 2, 3, 4], [5, 6, 7, 8]], -1.0)
    rounded = answers([[1, 2, 3, 9], [5, 6, 7, 8]], -1.2)
    found = {"dense float32 1": base, "dense bfloat16 1": rounded, "dense float32 tp": base}
    assert parallel.report_tokens(found, set(found), OPTIONS)
    assert "2 of 2 answers" in capsys.readouterr().out
    found["dense float32 dp"] = answers([[1, 2, 9, 4], [5, 6, 7, 8]], -1.0)
    assert not parallel.report_tokens(found, {"dense float32 dp"}, OPTIONS)
    assert "MISSED, the first to differ after 2 tokens" in capsys.readouterr().out
    found["dense bfloat16 tp"] = answers([[1, 2, 9, 4], [5, 6, 7, 8]], -1.0)  # its tokens may differ
    assert parallel.report_tokens(found, {"dense bfloat16 tp"}, OPTIONS)
    assert "1.8e-02 (target 0.02 met), log probabilities within 2.0e-01" in capsys.readouterr().out
    found["dense bfloat16 tp"] = answers([[1, 2, 9, 4], [5, 6, 7, 8]], -0.95)
    assert not parallel.report_tokens(found, {"dense bfloat16 tp"}, OPTIONS)
    out = capsys.readouterr().out
    assert "2.2e-02 (target 0.02 MISSED)" in out
    assert "0.25 x (target 1.25 met)" in out
    found["dense bfloat16 dp"] = answers([[1, 2, 3, 4], [5, 6, 7, 8]], -1.4)  # near enough, twice as far off
    assert not parallel.report_tokens(found, {"dense bfloat16 dp"}, OPTIONS)
    out = capsys.readouterr().out
    assert "1.8e-02 (target 0.02 met)" in out
    assert "2.00 x (target 1.25 MISSED)" in out
    found["moe float32 ep"] = base
    assert not parallel.report_tokens(found, {"moe float32 ep"}, OPTIONS)
    assert "one device was not run" in capsys.readouterr().out


def test_experts_of_fewer_layers_say_nothing_about_rounding(parallel, capsys):
    found = {f"moe {each}": answers([[1]], -1.0) for each in ("float32 1", "bfloat16 1", "bfloat16 ep")}
    fewer = argparse.Namespace(**{**vars(OPTIONS), "moe_layers": 12})
    assert parallel.report_tokens(found, {"moe bfloat16 ep"}, fewer)
    assert "from float32: unknown, float32 has 12 layers" in capsys.readouterr().out


def test_tokens_that_one_engine_does_not_list_count(parallel):
    base = {"first": [{"7": -1.0, "8": -3.0}]}
    difference = parallel.apart(base, {"first": [{"9": -1.5, "8": -3.5}]})
    assert sorted(difference.values.tolist()) == [-2.5, -0.5, 1.5]  # of 7, 8, 9
    assert difference.relative(2.0) == pytest.approx((8.75 / (1 + 1 + 1)) ** 0.5)


def test_logits_of_dummy_weights_follow_from_their_log_probabilities(parallel):
    config, rng = {"vocab_size": 50_000, "hidden_size": 2048}, np.random.default_rng(0)
    logits = rng.normal(0, 0.02 * 2048**0.5, config["vocab_size"])
    assert parallel.spread_of(config) == pytest.approx(logits.std(), rel=0.01)
    assert parallel.log_total(config) == pytest.approx(np.log(np.exp(logits).sum()), abs=0.02)


def test_times_are_judged(parallel, capsys):
    one = {"decode": {"1": 4.0, "32": 5.0, "256": 16.0}, "prefill": {"16 x 2048": 760.0}}
    two = {"decode": {"1": 2.9, "32": 4.0, "256": 10.1}, "prefill": {"16 x 2048": 470.0}}
    assert not parallel.report_times({"dense 1": one, "dense tp": two}, {"dense 1", "dense tp"}, OPTIONS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["met", "x", "MISSED", "met"]
    failed = {"dense 1": one, "dense tp": {"error": "out of memory"}}
    assert not parallel.report_times(failed, set(failed), OPTIONS)
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED out of memory" in lines[0]
    assert len(lines) == 5  # one device's times are told anyway
    large = {"large tp": {"ready": 60.0, "decode": {"1": 20.0, "64": 40.0}}}
    assert not parallel.report_large(large, set(large), OPTIONS)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[:2]] == ["met", "MISSED"]


def test_tokens_that_come_together_share_their_gap(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serving

    result = serving.RequestResult(start_time=10.0)
    result.ttft, result.itl, result.output_tokens = 1.0, [0.008, 0.0001, 0.0001, 0.0001, 0.004, 0.0], 7
    at, tokens = serving.token_times(result)
    assert at.tolist() == pytest.approx([11.0, 11.008, 11.0123])
    assert tokens.tolist() == [1, 4, 2]
    gaps = serving.time_between_tokens([result])
    assert gaps.tolist() == pytest.approx([0.002] * 4 + [0.00215] * 2, rel=0.01)
    assert len(serving.time_between_tokens([result], began=11.005)) == 2

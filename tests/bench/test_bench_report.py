"""Figures of runs, curves and their drawings, startup and offline results."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from jaxserve.bench.endpoint import RequestResult
from jaxserve.bench.plot import ticks, write_html, write_png
from jaxserve.bench.report import ReportConfig, print_table, summarise
from jaxserve.bench.startup import start_once
from jaxserve.bench.sweep import read_curve, write_sweep
from jaxserve.cli.main import main
from jaxserve.errors import ConfigError, JaxserveError

RESULTS = [
    RequestResult(
        10.0, ttft=0.1, latency=0.5, itl=[0.1, 0.3], prompt_len=5, output_tokens=5, counted_by="usage"
    ),
    RequestResult(10.2, ttft=0.3, latency=0.3, itl=[], prompt_len=6, output_tokens=1, counted_by="usage"),
    RequestResult(10.4, prompt_len=7, error="HTTP 503"),
]


def test_figures():
    config = ReportConfig(percentiles=(50, 99), goodput={"ttft": 200.0, "tpot": 100.0})
    summary = summarise(RESULTS, 2.0, config)
    expected = {
        "completed": 2, "failed": 1, "total_input_tokens": 11, "total_output_tokens": 6, "output_throughput": 3.0,
        "request_throughput": 1.0, "request_goodput": 0.5, "total_token_throughput": 8.5, "mean_ttft_ms": 200.0,
        "p50_ttft_ms": 200.0, "p99_ttft_ms": 298.0, "mean_tpot_ms": 100.0, "mean_itl_ms": 200.0, "mean_e2el_ms": 400.0,
        "max_concurrent_requests": 2, "max_output_tokens_per_s": 6.0,
    }  # fmt: skip
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    lines: list[str] = []
    print_table(summary, config, lines.append)
    assert "P99 TTFT (ms):                           298.00" in lines
    assert all(len(line) <= 52 for line in lines)


def curve_file(path: Path, name: str, scale: float) -> Path:
    results = []
    for rate in (1, 2, 4):
        good = [RequestResult(0.0, 0.1 * rate * scale, 0.4 * rate, [0.02] * 9, 5, 10, "usage")]
        result = summarise(good, 10.0 / rate / scale, ReportConfig())
        results.append({"request_rate": float(rate), "max_concurrency": None, **result})
    write_sweep(path, name, results)
    return path


def test_curves_are_drawn_over_each_other(tmp_path):
    paths = [curve_file(tmp_path / "a.json", "A <&>", 1.0), curve_file(tmp_path / "b.json", "B", 2.0)]
    page = tmp_path / "out" / "c.html"
    write_html([read_curve(path) for path in paths], page)
    text = page.read_text()
    assert not re.search(r"(src|href)=|@import|url\(|https?://", text), "the page fetches something"
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(drawings) == 4
    for drawing in drawings:
        assert len(drawing.findall(".//g")) == 2
        assert len(drawing.findall(".//circle")) == 12
        for circle in drawing.findall(".//circle"):
            assert 0 < float(circle.attrib["cx"]) <= 520
            assert 0 < float(circle.attrib["cy"]) <= 320
    assert text.count("<tr>") == 7
    assert "A &lt;&amp;&gt;" in text


@pytest.mark.slow
def test_a_png_beside_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    paths = [curve_file(tmp_path / "a.json", "A", 1.0), curve_file(tmp_path / "b.json", "B", 2.0)]
    page, picture = tmp_path / "out" / "c.html", tmp_path / "out" / "c.png"
    plot = ["bench", "sweep", "--plot", *map(str, paths), "--html", str(page), "--png", str(picture)]
    assert main(plot) == 0
    assert page.exists()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_files_of_bench_serve_are_curves_too(tmp_path):
    sweep = json.loads(curve_file(tmp_path / "a.json", "A", 1.0).read_text())["results"]
    lines = tmp_path / "runs.json"
    lines.write_text("".join(json.dumps(result) + "\n" for result in reversed(sweep)))
    assert read_curve(lines).results == sweep
    sweep[2]["output_throughput"] = 0.1  # beyond saturation; the line goes on with the load
    lines.write_text("".join(json.dumps(result) + "\n" for result in reversed(sweep)))
    assert read_curve(lines).results == sweep
    lines.write_text(json.dumps(sweep[0]) + "\n")
    assert read_curve(lines).results == sweep[:1]
    write_html([read_curve(lines)], tmp_path / "one.html")
    for text in ("{", "[]", '{"a": 1}', '[{"output_throughput": "fast"}]'):
        lines.write_text(text)
        with pytest.raises(ConfigError, match=r"runs\.json"):
            read_curve(lines)


def test_without_matplotlib_a_png_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"jaxserve\[bench\]"):
        write_png([], tmp_path / "x.png")


@pytest.mark.parametrize("highest", [0.0, 0.003, 1.0, 7.0, 99.9, 12345.0, float("inf")])
def test_ticks_are_round_and_reach_the_highest(highest):
    found = ticks(highest)
    assert 4 <= len(found) <= 10
    assert found[0] == 0
    assert found[-1] >= (highest if highest < float("inf") else 1) * (1 - 1e-9)


def test_a_sweep_needs_loads(capsys):
    assert main(["bench", "sweep"]) == 1
    assert "--request-rates or --max-concurrencies" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--uds=/x", "--compile_cache_dir", "--port"])
def test_flags_that_starts_do_not_take_are_named(flag, capsys):
    assert main(["bench", "startup", "--", "m", flag, "1"]) == 1
    assert flag.partition("=")[0].replace("_", "-") in capsys.readouterr().err


@pytest.mark.slow
def test_a_start_that_fails_says_why(tmp_path):
    with pytest.raises(JaxserveError, match="no-such-flag"):
        start_once(["--no-such-flag"], tmp_path, 60)

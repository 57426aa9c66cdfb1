"""Parts of a benchmark: one that fails or takes too long costs only itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import parts

    return parts


@pytest.fixture
def as_in_the_background():
    """A shell's background processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("as_in_the_background")
def test_what_fails_or_takes_too_long_costs_only_itself(parts, tmp_path, capsys):
    file = tmp_path / "results.json"
    run = parts.Parts(file, limit=60)

    def spin() -> None:
        while True:
            time.sleep(0.01)

    def broken() -> None:
        raise ValueError("no such thing")

    assert run.run("good", lambda: 1) == 1
    assert json.loads(file.read_text()) == {"good": 1}
    assert run.run("long", spin, limit=0.2) is None
    assert run.run("broken", broken) is None
    assert run.run("after", lambda n: n + 1, 4) == 5
    saved = json.loads(file.read_text())
    assert saved["good"] == 1
    assert saved["after"] == 5
    assert "stopped after" in saved["long"]["error"]
    assert saved["broken"]["error"] == "ValueError: no such thing"
    assert run.end() == 1
    assert "FAILED: long, broken" in capsys.readouterr().out


def test_ctrl_c_ends_everything(parts):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parts.Parts().run("any", interrupted)


def test_a_part_that_hangs_ends_the_process_and_leaves_what_was_saved(tmp_path):
    file = tmp_path / "results.json"
    code = f"""
import sys, threading
sys.path.insert(0, {str(BENCHMARKS)!r})
import parts
parts.GRACE = 0.2
run = parts.Parts(parts.Path({str(file)!r}))
run.run("good", lambda: 1)
def hang():
    while True:
        try:
            threading.Event().wait(60)
        except KeyboardInterrupt:
            pass  # as a call that does not return would
run.run("hanging", hang, limit=0.2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "hanging: FAILED, hangs" in done.stdout
    assert "in hang" in done.stderr  # where it was
    assert json.loads(file.read_text()) == {"good": 1}


def test_verdicts(parts):
    assert parts.verdict(1.2, 1.3) == "target 1.3 met"
    assert parts.verdict(1.2, 1.3, least=True) == "target 1.3 MISSED"

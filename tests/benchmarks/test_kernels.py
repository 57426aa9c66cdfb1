"""The kernels' benchmark without the GPU it is for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_interpreter import needs_mosaic_gpu

pytestmark = pytest.mark.device


def test_says_what_it_needs():
    script = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), "--sections", "ceilings"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "the Hopper kernels need" in done.stdout


@pytest.mark.slow
@needs_mosaic_gpu
def test_the_grouped_section_runs_interpreted(tmp_path):
    """All its paths, in tiny sizes: right results, and shares of what could be."""
    root, out = Path(__file__).parents[2], tmp_path / "figures.json"
    command = [sys.executable, str(root / "benchmarks" / "kernels.py"), "--sections", "grouped", "--tiny"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(out.read_text())
    checked = [r for r in records if "wrong" in r]
    assert checked
    assert not any(r["wrong"] for r in checked)
    paths = {r["path"] for r in records if "kernel_us" in r}
    assert paths == {"ours", "ragged_dot"}
    assert "copy" in done.stdout
    assert "dense" in done.stdout

"""The kernels' benchmark without the GPU it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.device


def test_says_what_it_needs():
    script = Path(__file__).parents[2] / "benchmarks" / "kernels.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(script), "--sections", "ceilings"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "the Hopper kernels need" in done.stdout

"""The Hopper backend on a Hopper GPU against the oracle, for each cache type.

``JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/pallas_kernels/test_gpu_on_card.py``, without pytest-xdist: the cases run
in processes of their own, several at a time, and each test shows its case's report. ``tests/support/card_attention.py``
runs single cases, under compute-sanitizer too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import card_attention
import jax
import pytest
from card_processes import run_cases


def is_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]

SECONDS = 100
"""A case may take, its share of starting a process included."""


@pytest.fixture(scope="module")
def reports(request):
    """Of the cases that were asked for; all of them run when the first one is."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.fail("run this file without pytest-xdist (no -n): it starts processes itself", pytrace=False)
    names = [item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__)]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-u", card_attention.__file__, "-"]
    processes = int(os.environ.get("CARD_PROCESSES", min(12, os.cpu_count() or 1)))
    return run_cases(command, names, environment, processes=processes, seconds=SECONDS)


@pytest.mark.parametrize("name", card_attention.CASES)
def test_equals_the_oracle(name, reports):
    print(f"{reports[name]}\n{reports[name].seconds:.1f} s")
    if reports[name].error is not None:
        pytest.fail(f"{name}: {reports[name]}", pytrace=False)

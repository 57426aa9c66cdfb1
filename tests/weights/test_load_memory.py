"""Host memory of loading: half a GiB in files over four devices stays under the largest tensor and an allowance."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_loading_does_not_hold_the_checkpoint() -> None:
    """A child process, for its memory is its own. The real bound, 2 GiB, scaled as the checkpoint is."""
    arguments = [
        "--gib",
        "0.5",
        "--size",
        "small",
        "--devices",
        "4",
        "--in-flight-mib",
        "64",
        "--allowance-mib",
        "192",
    ]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=500
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = re.search(r"loaded ([\d,]+) MiB .* bound ([\d,]+) MiB", done.stdout)
    assert sizes is not None
    loaded, bound = (int(size.replace(",", "")) for size in sizes.groups())
    assert bound < loaded / 1.9, "the bound would not notice a checkpoint that is held"

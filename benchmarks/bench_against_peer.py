"""``jaxserve bench serve`` beside an independent client, guidellm, against the same server.

    python -m venv /tmp/guidellm && /tmp/guidellm/bin/pip install guidellm
    python benchmarks/bench_against_peer.py --guidellm /tmp/guidellm/bin/guidellm

The server is jaxserve with the tests' fake device, or SmolLM2 with ``--model smollm2``, or one that runs already
(``--base-url`` and ``--tokenizer``). The two clients take turns with the same workload: random prompts, chat. Output
tokens/s come from a number of requests in flight; times to first token from Poisson arrivals at a rate, since a step
serves those together that come together, and in a closed loop how close they come is each client's own. Printed are
medians over the rounds and their ratios. Target: output tokens/s and mean time to first token within 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import httpx  # noqa: E402
from server_process import free_port, server_process  # noqa: E402
from tiny_checkpoints import write_tiny_checkpoint  # noqa: E402

TOLERANCE = 0.05
JUDGED = ("output tokens/s", "TTFT (ms)")


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    tokenizer: str
    """A folder that both clients read."""


def run_jaxserve(
    server: Server, arguments: argparse.Namespace, folder: Path, seed: int, poisson: bool
) -> dict[str, float]:
    load = (
        ["--request-rate", str(arguments.rate)] if poisson else ["--max-concurrency", str(arguments.streams)]
    )
    command = [
        sys.executable, "-m", "jaxserve.cli.main", "bench", "serve", "--base-url", server.url, "--model", server.model,
        "--tokenizer", server.tokenizer, "--backend", "openai-chat", "--num-prompts", str(arguments.requests),
        "--input-len", str(arguments.input_len), "--output-len", str(arguments.output_len), *load, "--save-result",
        "--result-dir", str(folder), "--result-filename", "ours.json", "--seed", str(seed),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    result = json.loads((folder / "ours.json").read_text())
    assert result["failed"] == 0
    return {
        "output tokens/s": result["output_throughput"],
        "TTFT (ms)": result["mean_ttft_ms"],
        "TPOT (ms)": result["mean_tpot_ms"],
        "input tokens": result["total_input_tokens"] / arguments.requests,
        "output tokens": result["total_output_tokens"] / arguments.requests,
    }


def run_guidellm(
    server: Server, arguments: argparse.Namespace, folder: Path, seed: int, poisson: bool
) -> dict[str, float]:
    load = (
        f"kind=poisson,rate={arguments.rate:g}" if poisson else f"kind=concurrent,streams={arguments.streams}"
    )
    data = f"kind=synthetic_text,prompt_tokens={arguments.input_len},output_tokens={arguments.output_len}"
    command = [
        arguments.guidellm, "run", "--disable-console", "--backend",
        f"kind=openai_http,target={server.url},model={server.model}", "--profile", load,
        "--constraint", f"kind=max_requests,count={arguments.requests}",
        "--data", data, "--tokenizer", f"kind=huggingface_auto,model={server.tokenizer}", "--seed",
        f"kind=static,value={seed}", "--output", f"kind=json,path={folder / 'theirs.json'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"guidellm failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    benchmark: dict[str, Any] = json.loads((folder / "theirs.json").read_text())["benchmarks"][0]
    metrics = benchmark["metrics"]

    def mean(name: str) -> float:
        return metrics[name]["successful"]["mean"]

    # Its own rate divides by a window of its own; tokens over the run's seconds is what both can be held to.
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    return {
        "output tokens/s": tokens / benchmark["duration"],
        "TTFT (ms)": mean("time_to_first_token_ms"),
        "TPOT (ms)": mean("inter_token_latency_ms"),
        "input tokens": mean("prompt_token_count"),
        "output tokens": mean("output_token_count"),
    }


@contextlib.contextmanager
def fake_device(arguments: argparse.Namespace) -> Generator[Server, None, None]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_checkpoint(Path(folder) / "llama")
        options = {
            "engine": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 4096},
            "runner": {"num_blocks": 20_000, "step_seconds": arguments.step_seconds, "max_model_len": 4096},
        }
        with server_process(model, **options) as server:
            yield Server(server.url, "fake", str(model))


@contextlib.contextmanager
def smollm2() -> Generator[Server, None, None]:
    """The packaged model on this machine's device. Both clients count with the tiny tokenizer: lengths differ from the
    server's count, by the same for both."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "jaxserve.cli.main",
        "serve",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = write_tiny_checkpoint(Path(folder) / "llama")
            while True:
                if process.poll() is not None:
                    raise SystemExit("The server ended by itself.")
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                time.sleep(0.2)
            yield Server(f"http://127.0.0.1:{port}", "SmolLM2-135M-Instruct", str(tokenizer))
    finally:
        process.terminate()
        process.wait(60)


def compare(server: Server, arguments: argparse.Namespace) -> bool:
    """Print the table; whether the judged figures agree."""
    clients = {"jaxserve": run_jaxserve, "guidellm": run_guidellm}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for name, client in clients.items():
                closed = client(server, arguments, Path(folder), number, False)
                timed = client(server, arguments, Path(folder), number, True)
                figures = {**timed, "output tokens/s": closed["output tokens/s"]}
                shown = {key: round(value, 2) for key, value in figures.items()}
                print(f"round {number + 1} {name:9}", shown, f"load {os.getloadavg()[0]:.1f}", flush=True)
                rounds[name].append(figures)
    agree = True
    print(f"\n{'':18}{'jaxserve':>12}{'guidellm':>12}{'ratio':>8}")
    for key in rounds["jaxserve"][0]:
        ours, theirs = (statistics.median(r[key] for r in rounds[name]) for name in clients)
        verdict = ""
        if key in JUDGED:
            met = abs(ours / theirs - 1) <= TOLERANCE
            agree, verdict = agree and met, "met" if met else "MISSED"
        print(f"{key:18}{ours:12.2f}{theirs:12.2f}{ours / theirs:8.3f} {verdict}")
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--guidellm", default="guidellm", help="its executable (default: on the PATH)")
    parser.add_argument("--model", choices=("fake", "smollm2"), default="fake")
    parser.add_argument("--base-url", help="a server that runs already")
    parser.add_argument("--served-model", help="its model's name")
    parser.add_argument("--tokenizer", help="its tokenizer's folder")
    parser.add_argument("--streams", type=int, default=4, help="requests in flight (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument(
        "--step-seconds", type=float, default=0.05, help="of the fake device (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args()
    print(f"Load average at the beginning: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    if arguments.base_url is not None:
        if not arguments.tokenizer or not arguments.served_model:
            parser.error("--base-url needs --served-model and --tokenizer")
        server = contextlib.nullcontext(
            Server(arguments.base_url, arguments.served_model, arguments.tokenizer)
        )
    else:
        server = fake_device(arguments) if arguments.model == "fake" else smollm2()
    with server as found:
        agree = compare(found, arguments)
    return 0 if agree or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())

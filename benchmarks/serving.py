"""Serving over HTTP: a real server with dummy weights, under Poisson arrivals and while long prompts arrive.

    python benchmarks/serving.py --model llama-8b --flags "--max-num-batched-tokens 2048"

One after another: all requests at once (the offline rate, and it warms the server up); Poisson arrivals at a share of
that rate; as many streams as decoded then on average, with nothing else (the pure decode step); and streams that decode
while long prompts arrive one by one. The server's tokenizer is made up for the occasion: a word for every token, so
that each token is an event. Prompts are token ids. ``--check`` exits with 1 if a target is missed.

Seconds on an H200, 8B: start 60 (25 with stored programs), all at once 12, Poisson arrivals ``--seconds`` and what they
leave, the decode step 10, long prompts 15. A case that fails or takes longer than ``--limit`` costs only itself, if
``--rate`` says what the first one would have found; each result is saved (``--json``) as soon as it is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from parts import clean_up_when_ended, import_path  # which also makes the package importable

from jaxserve.bench.endpoint import BenchRequest, Endpoint, RequestResult
from jaxserve.bench.http_client import HTTPClient
from jaxserve.bench.traffic import Traffic, send_all

MODELS = Path(__file__).parent / "models"
PROMPT, OUTPUT = 1024, 256
LONG_PROMPT, LONG_PROMPTS, LONG_EVERY = 8192, 8, 0.7
"""Tokens of a long prompt, how many of them come, and seconds between two."""
LOAD = 0.7
"""Share of the offline rate at which requests arrive."""
ITL_RATIO, TTFT_SECONDS, STALL_SECONDS = 1.3, 1.0, 0.060
"""Targets: median time between tokens over the pure decode step's, p99 time to first token, longest gap."""
TOGETHER_SECONDS = 0.0005
"""Tokens of a stream that come within this came together."""
READY_SECONDS = 600.0


def make_model(source: Path, folder: Path) -> int:
    """A folder with the model's config and a tokenizer of one word a token; the size of the vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    config = json.loads((source / "config.json").read_text())
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    (folder / "config.json").write_text(json.dumps(config))
    return config["vocab_size"]


def token_times(result: RequestResult) -> tuple[np.ndarray, np.ndarray]:
    """When tokens came, in seconds, and how many then: a dispatch of several decode steps brings several at once."""
    events = result.start_time + result.ttft + np.concatenate([[0.0], np.cumsum(result.itl)])
    firsts = np.concatenate([[True], np.diff(events) > TOGETHER_SECONDS])
    counts = np.diff(np.append(np.flatnonzero(firsts), len(events)))
    return events[firsts], counts * (result.output_tokens / len(events))


def time_between_tokens(results: Sequence[RequestResult], began: float = -np.inf) -> np.ndarray:
    """Seconds a token, of those that follow one after ``began``; tokens that came together share their gap."""
    gaps: list[np.ndarray] = []
    for result in results:
        at, tokens = token_times(result)
        late = at[:-1] >= began
        gaps.append(np.repeat(np.diff(at)[late] / tokens[1:][late], np.round(tokens[1:][late]).astype(int)))
    return np.concatenate(gaps)


class Server:
    """``jaxserve serve`` in a process of its own. Use it as a context manager."""

    def __init__(self, folder: Path, port: int, flags: Sequence[str], log: Path, ready: float) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log, self._ready = log.open("w"), ready
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.cli.main", "serve", str(folder), "--port", str(port),
             "--served-model-name", "model", "--load-format", "dummy", *flags],
            env={**os.environ, "PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1"},
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> Server:
        try:
            while not self._healthy():
                if self._process.poll() is not None or time.monotonic() - self._started > self._ready:
                    raise RuntimeError(
                        f"The server did not become ready:\n{Path(self._log.name).read_text()[-3000:]}"
                    )
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        print(f"ready after {time.monotonic() - self._started:.1f} s", flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (OSError, urllib.error.HTTPError):
            return False


class Cases:
    """The cases against one server."""

    def __init__(
        self, url: str, vocab_size: int, scale: int, seconds: float, limit: float, save: Path | None
    ) -> None:
        self._endpoint = Endpoint(
            HTTPClient(url, {}), "/v1/completions", False, "model", {"temperature": 0}, True
        )
        self._vocab, self._scale, self._seconds = vocab_size, scale, seconds
        self._rng = np.random.default_rng(0)
        self._limit, self._save = limit, save
        self.results: dict[str, dict[str, Any]] = {}
        self.met = True

    async def run(self, name: str, case: Coroutine[Any, Any, float | None]) -> float | None:
        """What the case returns; None if it failed, which costs only itself."""
        began, result = time.monotonic(), None
        try:
            async with asyncio.timeout(self._limit):
                result = await case
        except TimeoutError:
            self._fail(name, f"stopped after {self._limit:.0f} s")
        except BaseExceptionGroup as group:
            self._fail(name, "; ".join(map(str, group.exceptions))[:600])
        except Exception as error:
            self._fail(name, f"{type(error).__name__}: {str(error)[:600]}")
        print(f"# {name}: {time.monotonic() - began:.1f} s", flush=True)
        self.write()
        return result

    def _fail(self, name: str, error: str) -> None:
        self.met = False
        self.results[name] = {"error": error}
        print(f"{name}: FAILED, {error}", flush=True)

    def note(self, name: str, value: float) -> None:
        self.results[name] = {"value": value}

    def write(self) -> None:
        if self._save is not None:
            self._save.write_text(json.dumps(self.results, indent=1))

    def request(self, prompt: int, output: int) -> BenchRequest:
        length = max(1, prompt // self._scale)
        ids = self._rng.integers(0, self._vocab, length).tolist()
        return BenchRequest(ids, length, max(2, output // self._scale))

    async def send(self, requests: list[BenchRequest], rate: float) -> tuple[list[RequestResult], float]:
        results, seconds = await send_all(self._endpoint.send, requests, Traffic(rate), 0)
        errors = [result.error for result in results if not result.success]
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(results)} requests failed: {errors[0]}")
        return results, seconds

    def judge(self, name: str, value: float, target: float, unit: str) -> None:
        met = value <= target
        self.met = self.met and met
        self.results[name] = {"value": value, "target": target, "met": met}
        print(
            f"{name:44s} {value:9.2f} {unit:3s} target {target:7.2f} {'met' if met else 'MISSED'}", flush=True
        )

    async def offline_rate(self, count: int) -> float:
        """Requests a second with all of them there at once."""
        await self.send([self.request(PROMPT, OUTPUT) for _ in range(4)], float("inf"))
        results, seconds = await self.send([self.request(PROMPT, OUTPUT) for _ in range(count)], float("inf"))
        tokens = sum(result.output_tokens for result in results)
        print(f"all at once: {count / seconds:.2f} requests/s, {tokens / seconds:.0f} tokens/s", flush=True)
        self.note("all at once, tokens/s", tokens / seconds)
        return count / seconds

    async def poisson(self, rate: float) -> None:
        """Median time between tokens beside the pure decode step's, and the time to the first token."""
        count = max(8, int(rate * self._seconds))
        results, seconds = await self.send([self.request(PROMPT, OUTPUT) for _ in range(count)], rate)
        gaps = time_between_tokens(results)
        decoding = sum(result.latency - result.ttft for result in results)
        rows = max(1, round(decoding / seconds))
        ttft = np.array([result.ttft for result in results])
        print(
            f"{count} requests at {rate:.2f}/s: {rows} rows decode on average, TTFT median {np.median(ttft):.3f} s, "
            f"time between tokens: median {1e3 * np.median(gaps):.2f}, p99 {1e3 * np.percentile(gaps, 99):.2f} ms",
            flush=True,
        )
        self.judge("p99 time to first token", float(np.percentile(ttft, 99)), TTFT_SECONDS, "s")
        self.note("median time between tokens, ms", 1e3 * float(np.median(gaps)))
        self.write()
        step = await self._decode_step(rows)
        print(f"pure decode step of {rows} rows {1e3 * step:.2f} ms")
        self.note(f"decode step of {rows} rows, ms", 1e3 * step)
        self.judge("median time between tokens / decode step", float(np.median(gaps)) / step, ITL_RATIO, "x")

    async def _decode_step(self, rows: int) -> float:
        """Seconds between the tokens of streams that all decode."""
        # All their tokens, however small the benchmark: they must still decode when the last one begins.
        requests = [self.request(PROMPT, self._scale * OUTPUT) for _ in range(rows)]
        results, _ = await self.send(requests, float("inf"))
        began = max(result.start_time + result.ttft for result in results)
        gaps = time_between_tokens(results, began)
        if not gaps.size:
            raise RuntimeError(
                "all streams had ended, or brought all their tokens at once, when the last one began"
            )
        return float(np.median(gaps))

    async def long_prompts(self, streams: int, tokens: int) -> None:
        """The longest gap between two tokens of streams that decode while long prompts arrive."""
        requests = [self.request(64, self._scale * tokens) for _ in range(streams)]
        arrivals: list[tuple[float, RequestResult]] = []
        async with asyncio.TaskGroup() as group:
            decoding = group.create_task(self.send(requests, float("inf")))
            await asyncio.sleep(2.0 / self._scale)
            for _ in range(LONG_PROMPTS):
                began = time.perf_counter()
                (result,), _ = await self.send([self.request(LONG_PROMPT, 2)], float("inf"))
                arrivals.append((began, result))
                await asyncio.sleep(max(0.0, LONG_EVERY / self._scale - (time.perf_counter() - began)))
        results, _ = decoding.result()
        first, last = arrivals[0][0], arrivals[-1][0] + arrivals[-1][1].latency
        gaps: list[float] = []
        for result in results:
            at, _ = token_times(result)
            gaps += np.diff(at)[(at[1:] > first) & (at[:-1] < last)].tolist()
        if not gaps:
            raise RuntimeError("the streams ended before the long prompts came: give --stream-tokens more")
        ttft = np.median([result.ttft for _, result in arrivals])
        print(
            f"{streams} streams while {LONG_PROMPTS} prompts of {LONG_PROMPT // self._scale} arrive: their TTFT median "
            f"{ttft:.3f} s; gaps median {1e3 * np.median(gaps):.2f}, p99 {1e3 * np.percentile(gaps, 99):.2f} ms"
        )
        self.judge("longest decode stall", 1e3 * max(gaps), 1e3 * STALL_SECONDS, "ms")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def run_cases(options: argparse.Namespace, url: str, vocab_size: int) -> bool:
    cases = Cases(url, vocab_size, options.scale, options.seconds, options.limit, options.json)
    rate = await cases.run("all at once", cases.offline_rate(options.requests))
    arrivals = options.rate or (LOAD * rate if rate else None)
    if arrivals is not None:
        await cases.run("Poisson arrivals", cases.poisson(arrivals))
    await cases.run("long prompts", cases.long_prompts(options.streams, options.stream_tokens))
    return cases.met


def main() -> int:
    parser: Any = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-8b", help="a folder of benchmarks/models, or a path")
    parser.add_argument("--flags", default="", help="further flags of jaxserve serve, in one argument")
    parser.add_argument("--requests", type=int, default=256, help="of the offline rate")
    parser.add_argument("--rate", type=float, help=f"requests a second; default: {LOAD} x the offline rate")
    parser.add_argument("--seconds", type=float, default=30.0, help="of Poisson arrivals")
    parser.add_argument("--streams", type=int, default=32, help="that decode while long prompts arrive")
    parser.add_argument("--stream-tokens", type=int, default=2048, help="of each of them")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths (to try it on a CPU)")
    parser.add_argument("--limit", type=float, default=120, help="seconds of one case")
    parser.add_argument(
        "--ready", type=float, default=READY_SECONDS, help="seconds that the server may take to start"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--log", help="where the server's log goes")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args()
    clean_up_when_ended()
    source = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    flags = ["--max-model-len", "16384", "--no-enable-prefix-caching", *shlex.split(options.flags)]
    with tempfile.TemporaryDirectory(prefix="jaxserve-serving-") as folder:
        vocab_size = make_model(source, Path(folder))
        log = Path(options.log or f"{folder}/server.log")
        with Server(Path(folder), free_port(), flags, log, options.ready) as server:
            met = asyncio.run(run_cases(options, server.url, vocab_size))
    return 0 if met or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())

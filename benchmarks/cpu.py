"""jaxserve, llama.cpp and transformers on SmolLM2, on this machine's CPU, in one run.

    python benchmarks/cpu.py                # all that are installed, about ten minutes on 2 cores
    python benchmarks/cpu.py --http         # the HTTP server too
    python benchmarks/cpu.py --quick        # a smoke test: jaxserve alone, tiny sizes

Each engine runs in a process of its own, one after another, with all threads. All get the same prompts of
random token ids and the same number of output tokens, greedy, end-of-sequence ignored; nothing is reused
from one repetition to the next. llama.cpp reads the packaged GGUF as it is (Q4_1) and batches its own
parallel sequences; transformers computes the same weights in float32, in one padded batch with a KV cache.

    streams   output tokens/s of 32 streams that arrive at once, their prefill included
    decode    output tokens/s of the same streams after their first tokens
    prefill   prompt tokens/s of one prompt of 1,024 tokens
    single    output tokens/s of one stream after its first token
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib.util
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parts import import_path  # and scripts run without an installation

METRICS = ("streams", "decode", "prefill", "single")
TARGETS = (
    ("streams", "llama.cpp", 1.0),
    ("streams", "transformers", 1.3),
    ("prefill", "llama.cpp", 1.3),
    ("single", "transformers", 1.8),
)
"""(metric, peer, how many times as fast jaxserve is to be)."""
QUIET_LOAD = 1.5
"""Load average up to which figures count."""
PEERS = {
    "llama.cpp": ("llama_cpp", "pip install llama-cpp-python"),
    "transformers": ("torch", "pip install torch --index-url https://download.pytorch.org/whl/cpu"),
}
"""Engine -> (module it needs, what to install)."""


@dataclass(frozen=True)
class Workload:
    """Sizes of a run. ``vocab_size`` bounds the random token ids, ``budget`` is jaxserve's token budget."""

    model: str = ""
    num_streams: int = 32
    prompt_tokens: tuple[int, int] = (64, 128)
    output_tokens: int = 64
    prefill_tokens: int = 1024
    repetitions: int = 3
    vocab_size: int = 40000
    budget: int | None = None

    def prompts(self, repetition: int) -> list[list[int]]:
        """Of the concurrent streams; the first one is the single stream's."""
        rng = random.Random(repetition)
        return [self._random(rng, rng.randint(*self.prompt_tokens)) for _ in range(self.num_streams)]

    def long_prompt(self, repetition: int) -> list[int]:
        return self._random(random.Random(1000 + repetition), self.prefill_tokens)

    def _random(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(self.vocab_size // 40, self.vocab_size) for _ in range(length)]


Generate = Callable[[list[list[int]], int], None]
"""Complete all prompts at once with so many tokens each, remembering nothing of earlier calls."""


def measure(workload: Workload, generate: Generate) -> dict[str, list[float]]:
    """Tokens/s of every metric, one number a repetition, after a short round that is not counted."""
    samples: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for prompts in (workload.prompts(-1), [workload.long_prompt(-1)], workload.prompts(-1)[:1]):
        generate(prompts, 2)
    for repetition in range(workload.repetitions):
        prompts, long_prompt = workload.prompts(repetition), workload.long_prompt(repetition)
        rest = workload.output_tokens - 1
        first, whole = _seconds(generate, prompts, 1), _seconds(generate, prompts, rest + 1)
        single_first, single = _seconds(generate, prompts[:1], 1), _seconds(generate, prompts[:1], rest + 1)
        found = {
            "streams": len(prompts) * (rest + 1) / whole,
            "decode": _rate(len(prompts) * rest, whole - first),
            "prefill": len(long_prompt) / _seconds(generate, [long_prompt], 1),
            "single": _rate(rest, single - single_first),
        }
        print(" ".join(f"{name} {value:.1f}" for name, value in found.items()), file=sys.stderr, flush=True)
        for metric, value in found.items():
            samples[metric].append(value)
    return samples


def _rate(num_tokens: int, seconds: float) -> float:
    """NaN where noise made the longer run the quicker one."""
    return num_tokens / seconds if seconds > 0 else math.nan


def _seconds(generate: Generate, prompts: list[list[int]], num_tokens: int) -> float:
    started = time.perf_counter()
    generate(prompts, num_tokens)
    return time.perf_counter() - started


# --- the engines, each in its own process -------------------------------------------------------------------


@contextlib.contextmanager
def jaxserve_llm(workload: Workload) -> Iterator[Generate]:
    """``LLM`` with the defaults of a CPU."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxserve import LLM, SamplingParams

    with LLM(workload.model, max_num_batched_tokens=workload.budget) as llm:

        def generate(prompts: list[list[int]], num_tokens: int) -> None:
            llm.reset_prefix_cache()
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)

        yield generate


@contextlib.contextmanager
def jaxserve_http(workload: Workload) -> Iterator[Generate]:
    """``jaxserve serve``, with one streaming client per prompt in this process."""
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port)]
    if workload.model:
        flags += ["--model", workload.model]
    if workload.budget is not None:
        flags += ["--max-num-batched-tokens", str(workload.budget)]
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", *flags]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": import_path()}
    server = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    salts = iter(range(1 << 30))

    async def stream(client: httpx.AsyncClient, prompt: list[int], num_tokens: int, salt: str) -> None:
        body = {
            "model": name, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
        }  # fmt: skip
        used = 0
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if '"usage":{' in line:
                    used = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
        assert used == num_tokens, f"{used} tokens instead of {num_tokens}"

    async def all_streams(prompts: list[list[int]], num_tokens: int) -> None:
        limits = httpx.Limits(max_connections=None)
        salt = str(next(salts))  # nothing of an earlier call's prefixes is reused
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            await asyncio.gather(*(stream(client, prompt, num_tokens, salt) for prompt in prompts))

    try:
        _wait_until_ready(server, url)
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            name = json.load(response)["data"][0]["id"]
        yield lambda prompts, num_tokens: asyncio.run(all_streams(prompts, num_tokens))
    finally:
        server.terminate()
        server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    while server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.1)
    raise RuntimeError(f"The server ended with {server.returncode}.")


@contextlib.contextmanager
def llama_cpp(workload: Workload) -> Iterator[Generate]:
    """llama.cpp through its low-level API: one batch holds all sequences, as its own server does it."""
    import llama_cpp as lib
    import numpy as np

    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))  # hundreds of lines about the model's parts
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(gguf_path(workload).encode(), lib.llama_model_default_params())
    assert model, "llama.cpp cannot load the model"
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    many = LlamaContext(lib, model, workload.num_streams, workload.prompt_tokens[1] + workload.output_tokens)
    one = LlamaContext(lib, model, 1, workload.prefill_tokens + workload.output_tokens)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        context = one if len(prompts) == 1 else many
        context.forget()
        rows = [(seq, pos, token) for seq, prompt in enumerate(prompts) for pos, token in enumerate(prompt)]
        lengths = [len(prompt) for prompt in prompts]
        wanted = {(seq, length - 1) for seq, length in enumerate(lengths)}
        logits = context.decode(rows, wanted, vocab_size)
        for step in range(num_tokens - 1):
            rows = [
                (seq, lengths[seq] + step, int(np.argmax(logits[seq, lengths[seq] + step - 1])))
                for seq in range(len(prompts))
            ]
            logits = context.decode(rows, {row[:2] for row in rows}, vocab_size)

    yield generate


class LlamaContext:
    """A llama.cpp context for ``num_seqs`` sequences of ``length`` tokens each, with all threads."""

    BATCH = 2048

    def __init__(self, lib: Any, model: Any, num_seqs: int, length: int) -> None:
        params = lib.llama_context_default_params()
        length = -(-length // 256) * 256
        params.n_ctx, params.n_seq_max = num_seqs * length, num_seqs
        params.n_batch, params.n_ubatch = self.BATCH, 512
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        params.kv_unified = False  # a sequence attends to its own tokens only; faster with many
        params.no_perf = True
        self._lib, self._context = lib, lib.llama_init_from_model(model, params)
        assert self._context, "llama.cpp cannot make a context"
        self._batch = lib.llama_batch_init(self.BATCH, 0, 1)

    def forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def decode(
        self, rows: list[tuple[int, int, int]], wanted: set[tuple[int, int]], vocab_size: int
    ) -> dict[tuple[int, int], Any]:
        """Compute (sequence, position, token) rows; copies of the logits at the ``wanted`` places."""
        found: dict[tuple[int, int], Any] = {}
        for start in range(0, len(rows), self.BATCH):
            part = rows[start : start + self.BATCH]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, (seq, pos, token) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, pos, 1, seq
                batch.logits[i] = (seq, pos) in wanted
            code = self._lib.llama_decode(self._context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode failed with {code}")
            for i, (seq, pos, _) in enumerate(part):
                if (seq, pos) in wanted:
                    found[seq, pos] = self._logits(i, vocab_size)
        return found

    def _logits(self, index: int, vocab_size: int) -> Any:
        import numpy as np

        pointer = self._lib.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (vocab_size,)
        ).copy()


@contextlib.contextmanager
def transformers(workload: Workload) -> Iterator[Generate]:
    """``generate`` of transformers in float32: one batch, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    path = Path(gguf_path(workload))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=num_tokens, max_new_tokens=num_tokens,
            pad_token_id=0,
        )  # fmt: skip
        assert output.shape == (len(prompts), longest + num_tokens)

    yield generate


def gguf_path(workload: Workload) -> str:
    """The GGUF file that all engines read."""
    from jaxserve.weights.resolve import resolve_model

    path = resolve_model(workload.model).path
    if path.suffix != ".gguf":
        raise SystemExit(f"{path} is no .gguf file: llama.cpp reads nothing else. Add --engines jaxserve.")
    return str(path)


ENGINES: dict[str, Callable[[Workload], contextlib.AbstractContextManager[Generate]]] = {
    "jaxserve": jaxserve_llm,
    "jaxserve HTTP": jaxserve_http,
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}


def work(engine: str, workload: Workload) -> None:
    """What a subprocess does: measure one engine and print its samples as JSON."""
    with ENGINES[engine](workload) as generate:
        samples = measure(workload, generate)
    print(json.dumps(samples), flush=True)


# --- the table ----------------------------------------------------------------------------------------------


def run_engine(engine: str, workload: Workload) -> dict[str, list[float]] | None:
    """Measure in a subprocess; None, with a line that says why, if the engine is not installed or fails."""
    if engine in PEERS:
        module, install = PEERS[engine]
        if importlib.util.find_spec(module) is None:
            print(f"{engine}: not installed, left out. To compare: {install}", flush=True)
            return None
    print(f"{engine}: measuring (load average {os.getloadavg()[0]:.1f})", flush=True)
    command = [sys.executable, __file__, "--worker", engine, json.dumps(asdict(workload))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        print(f"{engine}: failed with exit code {done.returncode}; its messages are above.", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def print_table(results: dict[str, dict[str, list[float]]]) -> None:
    """Medians, with the spread between repetitions."""
    print("\ntokens/s: median of the repetitions (lowest to highest)")
    print(f"{'':15}" + "".join(f"{metric:>24}" for metric in METRICS))
    for engine, samples in results.items():
        cells = (
            f"{statistics.median(samples[m]):.1f} ({min(samples[m]):.1f} to {max(samples[m]):.1f})"
            for m in METRICS
        )
        print(f"{engine:15}" + "".join(f"{cell:>24}" for cell in cells))
    ours = results.get("jaxserve")
    for peer in PEERS:
        if ours is not None and peer in results:
            cells = (f"{ratio(ours, results[peer], metric):.2f} x" for metric in METRICS)
            print(f"{'over ' + peer:15}".ljust(18) + "".join(f"{cell:>24}" for cell in cells)[3:])


def ratio(ours: dict[str, list[float]], peer: dict[str, list[float]], metric: str) -> float:
    return statistics.median(ours[metric]) / statistics.median(peer[metric])


def check_targets(results: dict[str, dict[str, list[float]]]) -> bool:
    """Print each target that these results can judge, and whether all of those are met."""
    met = True
    for metric, peer, target in TARGETS:
        if "jaxserve" in results and peer in results:
            found = ratio(results["jaxserve"], results[peer], metric)
            verdict = "met" if found >= target else "MISSED"
            met = met and found >= target
            print(f"{metric}: {found:.2f} x {peer} (target {target} x): {verdict}")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="", help="a .gguf file, or any model with --quick; default: the packaged one"
    )
    parser.add_argument(
        "--engines", nargs="+", choices=list(ENGINES), help="default: all but the HTTP server"
    )
    parser.add_argument("--http", action="store_true", help="measure the HTTP server too")
    parser.add_argument("--repetitions", type=int, default=Workload.repetitions)
    parser.add_argument(
        "--quick", action="store_true", help="jaxserve alone, tiny sizes: does it run at all?"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "WORKLOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        engine, values = arguments.worker
        work(engine, Workload(**json.loads(values)))
        return 0

    workload = Workload(model=arguments.model, repetitions=arguments.repetitions)
    engines = arguments.engines or [
        engine for engine in ENGINES if arguments.http or engine != "jaxserve HTTP"
    ]
    if arguments.quick:
        workload = Workload(arguments.model, 4, (4, 8), 4, 32, repetitions=1, vocab_size=300, budget=16)
        engines = arguments.engines or ["jaxserve"]
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load average {load:.1f} before")
    if load > QUIET_LOAD and not arguments.quick:
        print(
            "This machine is busy: the ratios mean nothing (llama.cpp's threads wait in turns for each other)."
        )
    results: dict[str, dict[str, list[float]]] = {}
    failed = False
    for engine in engines:
        found = run_engine(engine, workload)
        if found is not None:
            results[engine] = found
        failed = failed or (found is None and engine not in PEERS)
    print_table(results)
    met = check_targets(results)
    return 1 if failed or (arguments.check and not met) else 0


if __name__ == "__main__":
    sys.exit(main())

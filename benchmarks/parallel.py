"""Tensor, expert and data parallelism on the GPUs of one host: the same tokens as one GPU's, and how much faster.

    python benchmarks/parallel.py                             # every case, on two H200s: about five minutes
    python benchmarks/parallel.py --cases tokens decode --devices 4
    python benchmarks/parallel.py --cases tokens --model tiny/ --moe-model tiny-moe/ --prompt 16 --tokens 8   # on a CPU

Weights are random (``--load-format dummy``), the same whatever the mesh. Every engine has a process of its own. Those
of a round start side by side, each with its share of the GPUs' memory, and then take turns: only one does anything.

    tokens    float32: greedy tokens of N devices equal one device's. bfloat16: log probabilities of the 20 likeliest
              first tokens, as far apart as stated. Dense (tp), experts (tp with expert parallelism), and data parallel
    decode    ms a step at 1, 32 and 256 rows and of prefill, 16 x 2,048, on 1 and N devices; of decode the median of
              the steps in which all rows ran
    moe       the same for experts at 256 rows
    large     a 70B shape on N devices beside its bandwidth floor
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

CASES = ("tokens", "decode", "moe", "large")
GIB = 1 << 30
SMALL = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "kv_cache_memory_bytes": GIB,
}
"""An engine for the comparison of tokens: few programs, so that it starts soon."""
TOP = 20
OUTPUT = 129
"""Tokens that every timed request gets."""


@dataclass(frozen=True)
class Run:
    """One engine and what it does.

    Args:
        name: in tables.
        model: a folder with a config.json.
        arguments: of ``LLM``.
        share: of the devices' memory, of an H200's 140 GiB; it shares them with the others of its round.
        device: the one it runs on, if it needs but one.
        rows, prefill: timed cases; neither: tokens are compared.
        prompt: tokens of a decoding row's prompt.
    """

    name: str
    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    share: float = 0.9
    device: int = 0
    rows: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    prompt: int = 1024

    @property
    def devices(self) -> int:
        return self.arguments.get("tensor_parallel_size", 1) * self.arguments.get("data_parallel_size", 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--model", default="llama-8b", help="dense; a folder of benchmarks/models, or a path")
    parser.add_argument("--moe-model", default="qwen3-30b-a3b", help="with experts")
    parser.add_argument("--large-model", default="llama-70b")
    parser.add_argument(
        "--moe-layers", type=int, default=12, help="of the float32 comparison, to fit one GPU"
    )
    parser.add_argument("--prompt", type=int, default=200, help="longest prompt of the comparison")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens compared")
    parser.add_argument("--limit", type=int, default=200, help="seconds for one engine to start, or to run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Run(**options.worker), options)
        return 0
    results: dict[str, Any] = {}
    failed = False
    for case in options.cases:
        began, found = time.monotonic(), {}
        for runs in plan(case, options):
            found |= run_round(runs, options)
        results |= found
        failed |= not REPORTS[case](found, options)
        print(f"# {case}: {time.monotonic() - began:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    return int(failed)


def plan(case: str, options: argparse.Namespace) -> list[list[Run]]:
    """The rounds of a case, of engines that fit the devices together."""
    n = options.devices
    tensor, experts = {"tensor_parallel_size": n}, {"tensor_parallel_size": n, "enable_expert_parallel": True}
    if case == "tokens":
        exact, rounded = {**SMALL, "dtype": "float32"}, {**SMALL, "dtype": "bfloat16"}
        few = {"hf_overrides": {"num_hidden_layers": options.moe_layers}}
        dense, moe = options.model, options.moe_model
        ranks = {"data_parallel_size": n}
        return [
            [
                Run("dense float32 1", dense, exact, 0.3), Run("moe float32 1", moe, {**exact, **few}, 0.35),
                Run("dense bfloat16 1", dense, rounded, 0.2, n - 1), Run("moe bfloat16 1", moe, rounded, 0.5, n - 1),
            ],
            [
                Run("dense float32 tp", dense, {**exact, **tensor}, 0.2),
                Run("dense bfloat16 tp", dense, {**rounded, **tensor}, 0.14),
                Run("dense float32 dp", dense, {**exact, **ranks}, 0.32),
            ],
            [
                Run("moe float32 ep", moe, {**exact, **few, **experts}, 0.24),
                Run("moe bfloat16 ep", moe, {**rounded, **experts}, 0.3),
                Run("moe float32 dp ep", moe, {**exact, **few, **ranks, "enable_expert_parallel": True}, 0.3),
            ],
        ]  # fmt: skip
    if case == "decode":
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_model_len": 2304}
        one = Run("dense 1", options.model, cached(sizes, 40), 0.5, rows=(1, 32, 256), prefill=((16, 2048),))
        many = replace(one, name="dense tp", arguments=cached({**sizes, **tensor}, 40 / n), share=0.35)
        return [[one, many]]
    if case == "moe":
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 2304}
        one = Run("moe 1", options.moe_model, cached(sizes, 18), 0.6, rows=(256,), prompt=512)
        return [
            [one, replace(one, name="moe ep", arguments=cached({**sizes, **experts}, 18 / n), share=0.34)]
        ]
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 1024, "max_model_len": 2304}
    return [[Run("large tp", options.large_model, cached({**tensor, **sizes}, 26 / n), 0.9, rows=(1, 64))]]


def cached(arguments: dict[str, Any], gib: float) -> dict[str, Any]:
    """With a cache of that size on each device: then temporaries are no part of a start."""
    return {**arguments, "kv_cache_memory_bytes": int(gib * GIB)}


def run_round(runs: list[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Name -> what each engine's process reported, or ``{"error": ...}``."""
    workers = [Worker(run, options) for run in runs]
    try:
        started = time.monotonic()
        for worker in workers:
            worker.wait_for("ready", started + options.limit)
        waited = time.monotonic() - started
        results = {worker.run.name: worker.finish(options) for worker in workers}
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
    names = ", ".join(run.name for run in runs)
    print(
        f"# {names}: {waited:.0f} s to start, {time.monotonic() - started - waited:.0f} s to run", flush=True
    )
    return results


class Worker:
    """An engine in a process of its own, on one device or on all: it starts, and runs when it is told."""

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self.run = run
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if run.devices == 1:
            visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            known = run.device < len(visible) and visible != [""]
            environment["CUDA_VISIBLE_DEVICES"] = visible[run.device] if known else str(run.device)
        flags = environment.get("XLA_FLAGS", "")
        if "host_platform_device_count" not in flags:
            environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={run.devices}"
        command = [
            sys.executable,
            __file__,
            "--worker",
            json.dumps(vars(run)),
            "--prompt",
            str(options.prompt),
        ]
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, "--tokens", str(options.tokens)], stdin=subprocess.PIPE, stdout=self._out,
            stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip

    def wait_for(self, word: str, until: float) -> Any:
        """What it printed under that word; None if it ended before, or did not by that time."""
        while True:
            ended = self.process.poll() is not None
            for line in self._lines():
                if line.startswith(f'{{"{word}"'):
                    return json.loads(line)[word]
            if ended or time.monotonic() > until:
                return None
            time.sleep(0.05)

    def finish(self, options: argparse.Namespace) -> dict[str, Any]:
        """Let it run, if it is ready; what it found."""
        result = None
        if self.wait_for("ready", 0) is not None and self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
            result = self.wait_for("result", time.monotonic() + options.limit)
        if result is not None:
            return result
        code, lines = self.process.poll(), self._lines()
        print("\n".join(lines[-6:]), flush=True)
        end = f"stopped after {options.limit} s" if code is None else f"exit {code}"
        return {"error": f"{end}: {lines[-1] if lines else 'no output'}"}

    def _lines(self) -> list[str]:
        self._out.seek(0)
        return self._out.read().splitlines()


def work(run: Run, options: argparse.Namespace) -> None:
    """In a process of its own: start the engine, wait, do what ``run`` says, print it as JSON."""
    from offline import MODELS, Engine

    folder = MODELS / run.model if (MODELS / run.model).is_dir() else Path(run.model)
    config = json.loads((folder / "config.json").read_text())
    arguments = {"gpu_memory_utilization": run.share, **run.arguments}
    engine = Engine("jaxserve", folder, arguments, steps=bool(run.rows))
    print(json.dumps({"ready": engine.startup}), flush=True)
    if not sys.stdin.readline():
        return  # the others failed
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {"ready": engine.startup}
    if run.rows or run.prefill:
        result |= timed(run, engine, config, rng)
    else:
        lengths = [1, 2, *rng.integers(3, max(4, options.prompt), 6).tolist()]
        result |= compared(
            engine, [rng.integers(8, config["vocab_size"], n).tolist() for n in lengths], options
        )
    print(json.dumps({"result": result}), flush=True)


def compared(engine: Any, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    params = engine.params(
        temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False, logprobs=TOP
    )
    outputs = [each.outputs[0] for each in engine.llm.generate(prompts, params, use_tqdm=False)]
    return {
        "tokens": [list(each.token_ids) for each in outputs],
        "first": [{str(t): lp.logprob for t, lp in each.logprobs[0].items()} for each in outputs],
    }


def timed(run: Run, engine: Any, config: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    def prompts(rows: int, tokens: int) -> list[list[int]]:
        return [rng.integers(8, config["vocab_size"], tokens).tolist() for _ in range(rows)]

    engine.run(prompts(2, 64), [8] * 2)
    result: dict[str, Any] = {"decode": {}, "prefill": {}}
    for rows in run.rows:
        engine.steps.clear()
        engine.run(prompts(rows, run.prompt), [OUTPUT] * rows)
        result["decode"][str(rows)] = 1e3 * statistics.median(engine.steps.full_decodes(rows))
    for rows, tokens in run.prefill:
        times = [engine.run(prompts(rows, tokens), [1] * rows) for _ in range(3)]
        result["prefill"][f"{rows} x {tokens}"] = 1e3 * statistics.median(times)
    return result


def report_tokens(results: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether all float32 tokens agree, and nothing failed."""
    good = True
    for name, other in results.items():
        if len(name.split()) < 3 or name.endswith(" 1"):
            continue
        base = results.get(f"{' '.join(name.split()[:2])} 1", {"error": "not run"})
        if "error" in other or "error" in base:
            print(f"{name:20s} FAILED {other.get('error') or base['error']}")
            good = False
            continue
        same = sum(a == b for a, b in zip(base["tokens"], other["tokens"], strict=True))
        apart = max(
            abs(row[token] - value)
            for mine, row in zip(base["first"], other["first"], strict=True)
            for token, value in mine.items()
            if token in row
        )
        total = len(base["tokens"])
        line = f"{name:20s} {same} of {total} answers of {options.tokens} tokens the same as one device's"
        print(f"{line}, first log probabilities within {apart:.1e}", flush=True)
        good &= same == total if "float32" in name else apart < 2e-2
    return good


def report_times(results: dict[str, Any], options: argparse.Namespace) -> bool:
    good = True
    for one, many in (("dense 1", "dense tp"), ("moe 1", "moe ep")):
        if one not in results and many not in results:
            continue
        base, other = results.get(one, {}), results.get(many, {})
        for error in filter(None, (base.get("error"), other.get("error"))):
            print(f"{many:10s} FAILED {error}")
            good = False
        for kind in ("decode", "prefill"):
            for case, ms in other.get(kind, {}).items():
                alone = base.get(kind, {}).get(case)
                scaling = "" if alone is None else f"{alone:9.2f} ms alone, {alone / ms:5.2f} x"
                print(f"{many:10s} {kind} {case:10s} {ms:9.2f} ms on {options.devices} {scaling}", flush=True)
    return good


def report_large(results: dict[str, Any], options: argparse.Namespace) -> bool:
    from offline import MODELS, Shape

    found = results["large tp"]
    if "error" in found:
        print(f"large      FAILED {found['error']}")
        return False
    folder = MODELS / options.large_model
    shape = Shape.of(json.loads((folder / "config.json").read_text()))
    for rows, ms in found["decode"].items():
        floor = 1e3 * shape.decode_floor(int(rows), 1024 + OUTPUT / 2) / options.devices
        print(
            f"large      decode {rows:10s} {ms:9.2f} ms on {options.devices}, floor {floor:.2f}: {ms / floor:.2f} x"
        )
    print(f"large      ready after {found['ready']:.0f} s", flush=True)
    return True


REPORTS = {"tokens": report_tokens, "decode": report_times, "moe": report_times, "large": report_large}


if __name__ == "__main__":
    sys.exit(main())

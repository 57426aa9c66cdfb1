"""Tensor, expert and data parallelism on the GPUs of one host: the same tokens as one GPU's, and how much faster.

    python benchmarks/parallel.py                             # every case, on two H200s
    python benchmarks/parallel.py --cases tokens decode --devices 4
    python benchmarks/parallel.py --cases tokens --model a/ --moe-model b/ --prompt 16 --tokens 8 --scale 8   # on a CPU

Weights are random (``--load-format dummy``), the same whatever the mesh, as long as no KV head is held twice. Every
engine has a process of its own. Those of a round start side by side, each with its share of the GPUs' memory, and then
take turns: only one does anything. An engine that does not start within ``--limit`` seconds, or takes longer than that
to run, is ended; the others go on. What a round found is printed, and saved (``--json``), when it ends.

    tokens    float32: greedy tokens of N devices equal one device's. bfloat16: the 20 likeliest first tokens' logits
              agree within 2e-2 (below). Dense (tp), experts (tp with expert parallelism), and data parallel. About
              70 s a round on two H200s, four rounds; with --moe-layers 12 three quarters of that
    decode    ms a step at 1, 32 and 256 rows and of prefill, 16 x 2,048, on 1 and N devices; of decode the median of
              the steps in which all rows ran. 70 s
    moe       the same for experts at 256 rows. 110 s
    large     a 70B shape on N devices beside its bandwidth floor. 120 s

How logits agree: the norm of the difference over the norm of one device's, both over the 20 likeliest first tokens of
all prompts. Engines tell log probabilities; ``log_total`` makes logits of them. A token that only one engine lists
counts as if the other had it last on its list, which is the least by which they differ. Printed beside it:

    log probabilities    the largest difference, which grows with the logits
    spread               the differences' root mean square over the standard deviation of all logits, which estimates
                         the relative error over the whole vocabulary. The likeliest tokens' logits are 3 to 5
                         deviations, hence this is about 4 times the other
    from float32         that of N devices, and of one, from one device in float32: what bfloat16 itself does. N devices
                         may be 1.25 times as far off as one

Layers of random weights enlarge a rounding, 32 of them some 50 times. In a simulation of a narrower dense model of 32
layers one device that adds up the same products in another order is 4e-2 of the spread from itself, and N devices are
no nearer to float32 if partial sums stay in float32. With ``--moe-layers`` the experts' model in float32 is another
one, and how far it is stays unknown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from offline import MODELS, Engine, Shape
from parts import clean_up_when_ended, verdict

CASES = ("tokens", "decode", "moe", "large")
GIB = 1 << 30
SMALL = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "kv_cache_memory_bytes": GIB,
}
"""An engine for the comparison of tokens: few programs, so that it starts soon."""
MEMORY = 139.8 * GIB
"""Of an H200."""
WORKSPACE = 4 * GIB
"""Beside an engine's weights: its cache, temporaries, the programs' code."""
MOST_SHARE = 0.9
"""Of the engines of one round together: each process has a context of CUDA too."""
APART = 2e-2
"""First tokens' logits in bfloat16, as a share of their size, at most."""
WORSE = 1.25
"""Times that N devices in bfloat16 may be as far from float32 as one is. Some, as eight prompts are few."""
DEVIATION = 0.02
"""Of dummy weights."""
SCALING = {
    "dense tp": {"decode": {"1": 1.35, "256": 1.6}, "prefill": {"16 x 2048": 1.6}},
    "moe ep": {"decode": {"256": 1.5}},
}
"""One device's time over that of two, at least."""
LARGE_OVER_FLOOR = 1.35
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
    parser.add_argument("--moe-layers", type=int, help="of the float32 comparison, instead of all")
    parser.add_argument("--prompt", type=int, default=200, help="longest prompt of the comparison")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens compared")
    parser.add_argument(
        "--scale", type=int, default=1, help="divide rows, budgets and lengths (to try it on a CPU)"
    )
    parser.add_argument("--limit", type=int, default=180, help="seconds for one engine to start, or to run")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--logs", type=Path, help="a folder for what each engine printed")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Run(**options.worker), options)
        return 0
    clean_up_when_ended()
    results: dict[str, Any] = {}
    failed: list[str] = []
    for case in options.cases:
        began = time.monotonic()
        try:
            if not run_case(case, options, results):
                failed.append(case)
        except Exception:
            traceback.print_exc()
            failed.append(case)
        print(f"# {case}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        print(f"MISSED or FAILED: {', '.join(failed)}", flush=True)
    return int(bool(failed))


def run_case(case: str, options: argparse.Namespace, results: dict[str, Any]) -> bool:
    """Run a case's rounds, each reported and saved as it ends; whether all is as it should be."""
    good, found = True, {}
    for runs in plan(case, options):
        new = run_round(runs, options)
        found |= new
        results |= new
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
        good &= REPORTS[case](found, set(new), options)
    return good


def plan(case: str, options: argparse.Namespace) -> list[list[Run]]:
    """The rounds of a case, of engines that fit the devices together."""
    if case == "tokens":
        return compared_runs(options)
    n, scale = options.devices, options.scale
    tensor = {"tensor_parallel_size": n}
    if case == "decode":
        name, gib, shares, many = "dense", 40, (0.5, 0.35), ("tp", tensor)
        model, rows, prefill, prompt, most = options.model, (1, 32, 256), ((16, 2048),), 1024, 4096
    elif case == "moe":
        name, gib, shares, many = "moe", 18, (0.58, 0.31), ("ep", {**tensor, "enable_expert_parallel": True})
        model, rows, prefill, prompt, most = options.moe_model, (256,), (), 512, 2048
    else:
        name, gib, shares, many = "large", 26, (None, 0.9), ("tp", tensor)
        model, rows, prefill, prompt, most = options.large_model, (1, 64), (), 1024, 1024
    sizes = {
        "max_num_seqs": max(rows) // scale, "max_num_batched_tokens": most // scale, "max_model_len": 2304,
    }  # fmt: skip
    ways = [("1", {}, gib, shares[0]), (many[0], many[1], gib / n, shares[1])]
    runs = [
        Run(
            f"{name} {way}", model, cached({**sizes, **parallel}, cache / scale), share, prompt=prompt // scale,
            rows=tuple(max(1, each // scale) for each in rows),
            prefill=tuple((max(2, r // scale), t // scale) for r, t in prefill),
        )
        for way, parallel, cache, share in ways if share is not None
    ]  # fmt: skip
    return [runs]


def compared_runs(options: argparse.Namespace) -> list[list[Run]]:
    n, dense, moe = options.devices, options.model, options.moe_model
    for model in (dense, moe):
        if n > (heads := read_config(model)["num_key_value_heads"]):
            raise ValueError(
                f"{model} has {heads} KV heads: on {n} devices some are held more than once, and each copy would have "
                f"random weights of its own. Compare on at most {heads} devices."
            )
    divided = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")
    small = {name: size // options.scale if name in divided else size for name, size in SMALL.items()}
    exact, rounded = {**small, "dtype": "float32"}, {**small, "dtype": "bfloat16"}
    fewer = {"hf_overrides": {"num_hidden_layers": options.moe_layers}} if options.moe_layers else {}
    deep: dict[str, Any] = {**exact, **fewer}
    whole: dict[str, Any] = {}
    tensor, ranks = {"tensor_parallel_size": n}, {"data_parallel_size": n}
    experts = {"enable_expert_parallel": True}
    rounds: list[list[tuple[str, str, dict[str, Any], dict[str, Any], int]]] = [
        [
            ("dense float32 1", dense, exact, whole, n - 1), ("dense bfloat16 1", dense, rounded, whole, n - 1),
            ("moe float32 1", moe, deep, whole, 0), ("moe bfloat16 1", moe, rounded, whole, n - 1),
        ],
        [
            ("dense float32 tp", dense, exact, tensor, 0), ("dense bfloat16 tp", dense, rounded, tensor, 0),
            ("dense float32 dp", dense, exact, ranks, 0), ("dense bfloat16 dp", dense, rounded, ranks, 0),
        ],
        [
            ("moe float32 ep", moe, deep, {**tensor, **experts}, 0),
            ("moe bfloat16 ep", moe, rounded, {**tensor, **experts}, 0),
        ],
        [
            ("moe float32 dp ep", moe, deep, {**ranks, **experts}, 0),
            ("moe bfloat16 dp ep", moe, rounded, {**ranks, **experts}, 0),
        ],
    ]  # fmt: skip
    runs = [
        [Run(name, model, {**sizes, **way}, device=device) for name, model, sizes, way, device in each]
        for each in rounds
    ]
    return [[replace(run, share=share_of(run)) for run in each] for each in runs]


def share_of(run: Run) -> float:
    """Of a device's memory, what an engine of ``SMALL`` needs: its weights there, and ``WORKSPACE``."""
    config = read_config(run.model) | run.arguments.get("hf_overrides", {})
    shape = Shape.of(config)
    experts = shape.layers * shape.experts * shape.expert_params
    tables = shape.head_params * (1 if config.get("tie_word_embeddings") else 2)
    tensor, ranks = run.arguments.get("tensor_parallel_size", 1), run.arguments.get("data_parallel_size", 1)
    params = (shape.matrix_params + tables) / tensor + experts / (tensor * ranks)
    return (params * (4 if run.arguments["dtype"] == "float32" else 2) + WORKSPACE) / MEMORY


def read_config(model: str) -> dict[str, Any]:
    return json.loads((folder_of(model) / "config.json").read_text())


def folder_of(model: str) -> Path:
    return MODELS / model if (MODELS / model).is_dir() else Path(model)


def cached(arguments: dict[str, Any], gib: float) -> dict[str, Any]:
    """With a cache of that size on each device: then temporaries are no part of a start."""
    return {**arguments, "kv_cache_memory_bytes": int(gib * GIB)}


def run_round(runs: list[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Name -> what each engine's process reported, or ``{"error": ...}``."""
    fullest = max(
        sum(run.share for run in runs if run.devices > 1 or run.device == d) for d in range(options.devices)
    )
    if fullest > MOST_SHARE + 1e-9:
        return {
            run.name: {"error": f"the round needs {fullest:.2f} of a device's memory; lower --moe-layers"}
            for run in runs
        }
    workers = [Worker(run, options) for run in runs]
    results: dict[str, Any] = {}
    try:
        started = time.monotonic()
        for worker in workers:
            if worker.wait_for("ready", started + options.limit) is None:
                results[worker.run.name] = worker.give_up(options, "to start")
        waited = time.monotonic() - started
        for worker in workers:
            if worker.run.name not in results:
                results[worker.run.name] = worker.finish(options)
    finally:
        for worker in workers:
            worker.stop(options)
    names = ", ".join(f"{run.name} ({run.share:.2f})" for run in runs)
    seconds = time.monotonic() - started
    print(f"# {names}: {waited:.0f} s to start, {seconds - waited:.0f} s to run", flush=True)
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
        sizes = {"--prompt": options.prompt, "--tokens": options.tokens, "--scale": options.scale}
        flags = [word for flag, value in sizes.items() for word in (flag, str(value))]
        self._out = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(vars(run)), *flags], stdin=subprocess.PIPE,
            stdout=self._out, stderr=subprocess.STDOUT, env=environment,
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
        """Let it run, as it is ready; what it found."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it ended meanwhile
            return self.give_up(options, "to run")
        result = self.wait_for("result", time.monotonic() + options.limit)
        return self.give_up(options, "to run") if result is None else result

    def give_up(self, options: argparse.Namespace, what: str) -> dict[str, Any]:
        """End it, so that it disturbs nobody; how it failed, of which its last lines are printed."""
        code, lines = self.process.poll(), self._lines()
        self.stop(options)
        print(f"--- {self.run.name}:", *lines[-8:], sep="\n", flush=True)
        end = f"not done after {options.limit} s {what}" if code is None else f"exit {code}"
        return {"error": f"{end}: {lines[-1] if lines else 'no output'}"}

    def stop(self, options: argparse.Namespace) -> None:
        """End its process, and keep what it printed. Callable twice."""
        self.process.kill()
        self.process.wait()
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{self.run.name.replace(' ', '_')}.log").write_text("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        """Read in place: the process writes where the file's own offset is."""
        size = os.fstat(self._out.fileno()).st_size
        return os.pread(self._out.fileno(), size, 0).decode(errors="replace").splitlines()


def work(run: Run, options: argparse.Namespace) -> None:
    """In a process of its own: start the engine, wait, do what ``run`` says, print it as JSON."""
    arguments = {"gpu_memory_utilization": run.share, **run.arguments}
    config = read_config(run.model)
    engine = Engine("jaxserve", folder_of(run.model), arguments, steps=bool(run.rows))
    print(json.dumps({"ready": engine.startup}), flush=True)
    if not sys.stdin.readline():
        return  # the others failed
    rng = np.random.default_rng(0)
    result: dict[str, Any] = {"ready": engine.startup}
    if run.rows or run.prefill:
        result |= timed(run, engine, config, rng, options)
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


def timed(
    run: Run, engine: Any, config: dict[str, Any], rng: np.random.Generator, options: argparse.Namespace
) -> dict[str, Any]:
    def prompts(rows: int, tokens: int) -> list[list[int]]:
        return [rng.integers(8, config["vocab_size"], tokens).tolist() for _ in range(rows)]

    def decode(rows: int) -> float:
        engine.steps.clear()
        engine.run(prompts(rows, run.prompt), [OUTPUT] * rows)
        return statistics.median(engine.steps.full_decodes(rows))

    def prefill(rows: int, tokens: int) -> float:
        return statistics.median(engine.run(prompts(rows, tokens), [1] * rows) for _ in range(3))

    engine.run(prompts(2, 64 // options.scale), [8] * 2)
    result: dict[str, Any] = {"decode": {}, "prefill": {}, "failed": []}
    cases = [("decode", str(rows), decode, (rows,)) for rows in run.rows]
    cases += [("prefill", f"{rows} x {tokens}", prefill, (rows, tokens)) for rows, tokens in run.prefill]
    for kind, case, function, sizes in cases:
        try:
            result[kind][case] = 1e3 * function(*sizes)
        except Exception as error:  # of one case; the others are timed
            traceback.print_exc()
            result["failed"].append(f"{kind} {case}: {str(error)[:200]}")
        else:
            print(f"{kind} {case}: {result[kind][case]:.2f} ms", flush=True)
    return result


def report_tokens(found: dict[str, Any], new: set[str], options: argparse.Namespace) -> bool:
    """Whether what was found just now agrees with one device's, and nothing failed."""
    good = True
    for name in sorted(new):
        kind, dtype, way = name.split(maxsplit=2)
        other, base = found[name], found.get(f"{kind} {dtype} 1", {"error": "one device was not run"})
        if "error" in other or "error" in base:
            print(f"{name:20s} FAILED {other.get('error') or base['error']}", flush=True)
            good = False
        elif way != "1":
            good &= report_comparison(name, base, other, options)
            if dtype == "bfloat16":
                exact = found.get(f"{kind} float32 1", {"error": "one device was not run in float32"})
                good &= report_rounding(name, base, other, exact, options)
    return good


def report_comparison(
    name: str, base: dict[str, Any], other: dict[str, Any], options: argparse.Namespace
) -> bool:
    same = sum(a == b for a, b in zip(base["tokens"], other["tokens"], strict=True))
    total, difference = len(base["tokens"]), apart(base, other)
    largest = f"log probabilities within {np.abs(difference.values).max():.1e}"
    agree = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(base["tokens"], other["tokens"], strict=True)
    ]
    line = f"{name:20s} {same} of {total} answers of {options.tokens} tokens the same as one device's"
    if "float32" in name:
        good = same == total
        line += (
            f" (target all: {'met' if good else f'MISSED, the first to differ after {min(agree)} tokens'})"
        )
        print(f"{line}; first {largest}", flush=True)
        return good
    error = difference.relative(log_total(config_of(name, options)))
    print(f"{line}; first logits within {error:.1e} ({verdict(error, APART)}), {largest}", flush=True)
    return error <= APART


def report_rounding(
    name: str, base: dict[str, Any], other: dict[str, Any], exact: dict[str, Any], options: argparse.Namespace
) -> bool:
    """Whether N devices in bfloat16 are about as far from float32 as one is, where float32 ran the same model."""
    config = config_of(name, options)
    spread = spread_of(config)
    line = f"{'':20s} {apart(base, other).root_mean_square / spread:.1e} of all logits' spread"
    layers = options.moe_layers if name.startswith("moe") else None
    if "error" in exact or layers not in (None, config["num_hidden_layers"]):
        why = exact.get("error", f"float32 has {layers} layers")
        print(f"{line}; from float32: unknown, {why}", flush=True)
        return True
    alone, many = (apart(exact, each).root_mean_square / spread for each in (base, other))
    line += f"; from float32 {many:.1e}, one device {alone:.1e}"
    if not alone:
        print(f"{line}: float32 is not more exact", flush=True)
        return not many
    print(f"{line}: {many / alone:.2f} x ({verdict(many / alone, WORSE)})", flush=True)
    return many <= WORSE * alone


@dataclass(frozen=True)
class Difference:
    """Between two engines' log probabilities of first tokens.

    Args:
        values: [tokens of all prompts], the other's less the base's.
        base: [tokens of all prompts], the base's.
    """

    values: np.ndarray
    base: np.ndarray

    @property
    def root_mean_square(self) -> float:
        return float(np.sqrt(np.mean(self.values**2)))

    def relative(self, total: float) -> float:
        """Its norm over that of the base's logits, which are log probabilities plus ``total``."""
        return float(np.linalg.norm(self.values) / np.linalg.norm(self.base + total))


def apart(base: dict[str, Any], other: dict[str, Any]) -> Difference:
    """Over all tokens that either lists; what one does not list counts as the last that it does."""
    pairs = [
        (mine.get(token, min(mine.values())), row.get(token, min(row.values())))
        for mine, row in zip(base["first"], other["first"], strict=True)
        for token in mine | row
    ]
    values = np.asarray(pairs)
    return Difference(values[:, 1] - values[:, 0], values[:, 0])


def config_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    return read_config(options.moe_model if name.startswith("moe") else options.model)


def spread_of(config: dict[str, Any]) -> float:
    """The standard deviation of a row's logits: products of dummy weights with a vector that was just normed."""
    return DEVIATION * math.sqrt(config["hidden_size"])


def log_total(config: dict[str, Any]) -> float:
    """A row's logits less its log probabilities: the logarithm of the sum of V exponentials of normal logits."""
    return math.log(config["vocab_size"]) + spread_of(config) ** 2 / 2


def report_times(found: dict[str, Any], new: set[str], options: argparse.Namespace) -> bool:
    """How much faster N devices are; whether that is as much as it should be, where that is said."""
    good = True
    for one, many in (("dense 1", "dense tp"), ("moe 1", "moe ep")):
        if many not in new:
            continue
        base, other = found.get(one, {}), found[many]
        for name, each in ((one, base), (many, other)):
            for error in [each["error"]] if "error" in each else each.get("failed", []):
                print(f"{name:10s} FAILED {error}", flush=True)
                good = False
        for kind in ("decode", "prefill"):
            for case in {**base.get(kind, {}), **other.get(kind, {})}:
                alone, ms = base.get(kind, {}).get(case), other.get(kind, {}).get(case)
                times = [f"{each:9.2f} ms on {n}" for each, n in ((alone, 1), (ms, options.devices)) if each]
                line = f"{many:10s} {kind} {case:10s} {', '.join(times)}"
                if alone and ms:
                    line += f", {alone / ms:5.2f} x"
                    target = SCALING[many].get(kind, {}).get(case) if options.scale == 1 else None
                    if target is not None and options.devices == 2:
                        line += f"  {verdict(alone / ms, target, least=True)}"
                        good &= alone / ms >= target
                print(line, flush=True)
    return good


def report_large(found: dict[str, Any], new: set[str], options: argparse.Namespace) -> bool:
    large = found["large tp"]
    if "error" in large:
        print(f"large      FAILED {large['error']}", flush=True)
        return False
    shape, good = Shape.of(read_config(options.large_model)), not large.get("failed")
    for error in large.get("failed", []):
        print(f"large      FAILED {error}", flush=True)
    for rows, ms in large["decode"].items():
        floor = 1e3 * shape.decode_floor(int(rows), 1024 // options.scale + OUTPUT / 2) / options.devices
        line = f"large      decode {rows:10s} {ms:9.2f} ms on {options.devices}, floor {floor:.2f}: {ms / floor:.2f} x"
        if options.scale == 1:
            line += f"  {verdict(ms / floor, LARGE_OVER_FLOOR)}"
            good &= ms / floor <= LARGE_OVER_FLOOR
        print(line, flush=True)
    print(f"large      ready after {large['ready']:.0f} s", flush=True)
    return good


REPORTS = {"tokens": report_tokens, "decode": report_times, "moe": report_times, "large": report_large}


if __name__ == "__main__":
    sys.exit(main())

"""Whether outputs depend on their requests alone on a GPU, bit for bit, and what that costs. One table a part.

    python benchmarks/invariance.py --model llama-8b --parts ops,cost,bits,restart,off
    python benchmarks/invariance.py --model smollm2 --parts bits,restart,off
    python benchmarks/invariance.py --model smollm2 --parts bits --products xla --norm halves

On two GPUs of a host, side by side:

    CUDA_VISIBLE_DEVICES=0 python benchmarks/invariance.py --parts cost,bits,restart --modes on --save on.json &
    CUDA_VISIBLE_DEVICES=1 python benchmarks/invariance.py --parts cost,off --modes off --save off.json; wait
    python benchmarks/invariance.py --compare on.json off.json

Which kernels the mode makes slower: ``--parts cost --decode '' --prefill '' --throughput 0 --profile 64,1x8192``.

ops    norms, products, rotation and activation alone: the first row's bits among 8 to 8,192 rows. 50 s for 8B
bits   requests alone and among up to 511 others, with the mode on: random company, order, cache (warm, cold, written
       while decoding), token budget, asynchronous scheduling, forced preemptions. 200 situations: 100 s for 8B
restart the same requests alone in another process, which finds the programs of the first one. 20 s
off    as bits, with the mode off. 15 s for 40 situations
cost   decode, prefill and greedy offline throughput with the mode on and off, and their ratio. 45 s a mode; and with
       ``--profile``, as ``profile_step.py`` takes it, the kernels of such steps, on beside off

An engine has a process of its own: one with the mode on (33 to 40 s to start on an H200 without stored programs) for
cost and bits, one after a restart (6 s), one with the mode off (35 s) for cost and off. A part that fails or takes too
long costs only itself; ``--save`` has the results of all others. Exits with 1 if a bit differs or a part fails.

``--products`` and ``--norm`` exchange what the mode uses, to compare candidates.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import profile_step
from invariance_operations import try_operations
from invariance_situations import try_restart, try_situations
from offline import Benchmark, Engine
from parts import Parts, clean_up_when_ended, verdict

from jaxserve import LLM, SamplingParams

MODELS = Path(__file__).parent / "models"
COST = {"1 rows": 0.90}
"""Words of a case: how fast it is with the mode on, as a share, at least; of all others ``LEAST``."""
LEAST = 0.97


def choose(options: argparse.Namespace) -> Any:
    """Have engines use the candidates that were asked for."""
    from jaxserve.runner import invariance, model_runner

    chosen = partial(
        invariance.Invariance,
        norm_kernel=options.norm == "kernel",
        product_kernel=options.products == "kernel",
    )
    return mock.patch.object(model_runner, "Invariance", chosen)


def make_llm(options: argparse.Namespace, *, invariant: bool, **arguments: Any) -> LLM:
    folder = MODELS / options.model
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True} if folder.is_dir() else {}
    model = "" if options.model == "smollm2" else str(folder) if folder.is_dir() else options.model
    overrides = {"hf_overrides": {"num_hidden_layers": options.layers}} if options.layers else {}
    started = time.perf_counter()
    llm = LLM(model, batch_invariant=invariant, **{**dummy, **overrides, **arguments, **options.arguments})
    mode = "on" if invariant else "off"
    print(f"{options.model}, mode {mode}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    return llm


# --- cost -------------------------------------------------------------------------------------------------------


def measure(llm: LLM, options: argparse.Namespace, found: dict[str, float]) -> None:
    """Add each case's value to ``found`` when it has been measured as ``offline.py`` does."""
    import offline

    offline.PROMPT, offline.OUTPUT = options.prompt, 129
    engine = object.__new__(Engine)
    engine.llm, engine.name, engine.params, engine.rows = (
        llm,
        "jaxserve",
        SamplingParams,
        llm._core.scheduler.config.max_num_seqs,
    )
    engine.steps = None
    folder = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    config = json.loads((folder / "config.json").read_text())
    benchmark = Benchmark(engine, options.model, config, options.scale)
    benchmark.engine.run(benchmark.prompts([64] * 4), [8] * 4)
    cases = [partial(benchmark.decode, int(rows)) for rows in filter(None, options.decode.split(","))]
    for case in filter(None, options.prefill.split(",")):
        rows, tokens = map(int, case.split("x"))
        cases.append(partial(benchmark.prefill, rows, max(1, tokens // options.scale)))
    for name in list(offline.THROUGHPUT)[: options.throughput]:
        cases.append(partial(benchmark._throughput, name, sampled=False))
    for case in cases:
        with redirect_stdout(io.StringIO()):  # its targets are of other sizes
            case()
        result = benchmark.results[-1]
        name = f"{result['case']}, {result['unit']}"
        found[name] = result["value"]
        print(f"  {name:44s} {found[name]:10.2f}", flush=True)


def compare_cost(on: dict[str, float], off: dict[str, float]) -> bool:
    """Print how fast each case is with the mode on; whether all are as fast as they should be."""
    good = True
    print(f"{'cost':44s} {'on':>10s} {'off':>10s}   on's speed")
    for case, value in on.items():
        if case not in off:
            print(f"{case:44s} {value:10.2f} {'':>10s}   not run with the mode off")
            continue
        faster = value / off[case] if "tokens/s" in case else off[case] / value
        least = next((share for words, share in COST.items() if f" {words}" in case), LEAST)
        good &= faster >= least
        print(
            f"{case:44s} {value:10.2f} {off[case]:10.2f}   {faster:6.3f} x  {verdict(faster, least, least=True)}"
        )
    sys.stdout.flush()
    return good


def profile(parts: Parts, mode: str, llm: LLM, options: argparse.Namespace) -> None:
    """Profile each case as a part of its own."""
    folder = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    context, shape = options.prompt // options.scale, profile_step.shape_of(folder)
    for case in filter(None, options.profile.split(",")):
        print(f"profile {case}, mode {mode}", flush=True)
        words = profile_step.scaled(case, options.scale), context, options.top, shape
        parts.run(f"profile {case} {mode}", profile_step.profile, llm, *words, limit=PROFILE)


def compare_profiles(results: dict[str, Any], top: int) -> None:
    """Print what each case that was profiled in both modes took, and the kernels that differ most, in us a step."""
    cases = [
        name.removesuffix(" on") for name in results if name.startswith("profile ") and name.endswith(" on")
    ]
    for case in cases:
        on, off = (results.get(f"{case} {mode}", {"error": "it was not profiled"}) for mode in ("on", "off"))
        if "error" in on or "error" in off:
            continue
        print(f"{case + ', us a step':62s} {'on':>10s} {'off':>10s} {'on - off':>10s}")
        times: list[dict[str, float]] = [each["times"] for each in (on, off)]
        kernels = {name: [each.get(name, 0.0) for each in times] for name in times[0] | times[1]}
        differing = sorted(kernels, key=lambda name: abs(kernels[name][0] - kernels[name][1]), reverse=True)
        kinds = {
            name: [each.get("kinds", {}).get(name, 0.0) for each in (on, off)]
            for name in on.get("kinds", {}) | off.get("kinds", {})
        }
        lines = {name: [on[name], off[name]] for name in ("wall", "busy")} | kinds
        for name, (first, second) in [*lines.items(), *((name, kernels[name]) for name in differing[:top])]:
            print(f"  {name[:60]:60s} {first:10.1f} {second:10.1f} {first - second:10.1f}")
    sys.stdout.flush()


def main() -> int:
    options = arguments()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s")
    if options.compare:
        costs, profiles = [], dict[str, Any]()
        for path, mode in zip(options.compare, ("on", "off"), strict=True):
            saved = json.loads(path.read_text())
            costs.append(saved.get(f"cost {mode}", {"error": "it was not measured"}))
            profiles |= {name: each for name, each in saved.items() if name.startswith("profile ")}
            if "error" in costs[-1]:
                sys.exit(f"{path} has no cost with the mode {mode}: {costs[-1]['error']}")
        compare_profiles(profiles, options.top)
        return int(not compare_cost(*costs))
    if options.worker:
        return work(options)
    clean_up_when_ended()
    parts = set(filter(None, options.parts.split(",")))
    if unknown := parts - PARTS.keys():
        sys.exit(f"--parts knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}.")
    modes = options.modes.split(",")
    workers = ["ops"] if "ops" in parts else []
    for worker, (mode, wanted) in WORKERS.items():
        if mode in modes and parts & wanted:
            workers.append(worker)
    results: dict[str, Any] = {}
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        for worker in workers:
            code |= run_worker(worker, options, Path(folder), results)
            if options.save:
                options.save.write_text(json.dumps(results, indent=1))
    if all("error" not in results.get(f"cost {mode}", {"error": ""}) for mode in ("on", "off")):
        compare_cost(results["cost on"], results["cost off"])
    compare_profiles(results, options.top)
    return code


PARTS = {"ops": 120, "cost": 150, "bits": 240, "restart": 60, "off": 120}
"""Part -> its time limit in seconds; of bits and off ``--seconds`` ends them before."""
WORKERS = {"on": ("on", {"cost", "bits"}), "restart": ("on", {"restart"}), "off": ("off", {"cost", "off"})}
"""Engine -> its mode, and what it is for."""
PROFILE = 60.0
"""Seconds of one profiled case."""
START = 300.0
"""Seconds that an engine may take to start."""
SIZES = {"max_model_len": 4096, "max_num_seqs": 512, "max_num_batched_tokens": 8192}


def sizes(options: argparse.Namespace) -> dict[str, int]:
    """The engines' sizes: ``SIZES``, but room for the longest prompt of cost."""
    cases = [case.split("x") for case in f"{options.prefill},{options.profile}".split(",")]
    longest = max((int(case[1]) // options.scale for case in cases if len(case) == 2), default=0)
    return {**SIZES, "max_model_len": max(SIZES["max_model_len"], 2 * longest)}


def run_worker(name: str, options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> int:
    """Start this script again for one engine, within a time limit, and take over what it saved; its exit code."""
    save = folder / f"{name}.json"
    command = [
        sys.executable,
        *sys.argv,
        "--worker",
        name,
        "--save",
        str(save),
        "--expected",
        str(folder / "bits.json"),
    ]
    limit = START + sum(PARTS.values()) + 2 * options.seconds
    try:
        code = subprocess.run(command, timeout=limit, env={**os.environ, "PYTHONUNBUFFERED": "1"}).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: FAILED, hung: stopped after {limit:.0f} s", flush=True)
        code = 1
    if save.exists():
        results |= json.loads(save.read_text())
    elif code:
        print(f"{name}: FAILED, exit {code}", flush=True)
    return int(code != 0)


def work(options: argparse.Namespace) -> int:
    """One engine's parts, in a process of its own."""
    parts, wanted = Parts(options.save), options.parts.split(",")
    if options.worker == "ops":
        parts.run("ops", try_operations, options, limit=PARTS["ops"])
        return parts.end()
    mode = WORKERS[options.worker][0]
    if options.worker == "restart" and not options.expected.exists():
        sys.exit("restart: FAILED, needs what bits keeps: name it in --parts, and --modes on.")
    made: list[LLM] = []
    name = f"start {options.worker}"
    choose(options).start()  # until the process ends
    parts.run(
        name, lambda: made.append(make_llm(options, invariant=mode == "on", **sizes(options))), limit=START
    )
    if not made:
        return 1
    [llm] = made
    del parts.results[name]
    wrong = 0
    if options.worker == "restart":
        found = parts.run("restart", try_restart, llm, options, limit=PARTS["restart"])
        wrong = (found or {}).get("different", 0)
    elif "cost" in wanted:
        times: dict[str, float] = {}
        parts.run(f"cost {mode}", measure, llm, options, times, limit=PARTS["cost"])
        if times or f"cost {mode}" not in parts.failed:
            parts.results[f"cost {mode}"] = times  # those that were measured, should one have failed
            parts.save()
        profile(parts, mode, llm, options)
        llm.reset_prefix_cache()
    if options.worker == "on" and "bits" in wanted:
        found = parts.run(
            "bits", lambda: try_situations(llm, options, options.situations, mode="on"),
            limit=PARTS["bits"] + options.seconds,
        )  # fmt: skip
        wrong = (found or {}).get("different", 0)
    if options.worker == "off" and "off" in wanted:
        parts.run(
            "off", lambda: try_situations(llm, options, options.off_situations, mode="off"),
            limit=PARTS["off"] + options.seconds,
        )  # fmt: skip
    return parts.end() or int(wrong > 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama-8b", help="a folder of benchmarks/models, smollm2, or a path"
    )
    parser.add_argument("--parts", default="ops,cost,bits,restart,off")
    parser.add_argument("--products", choices=("kernel", "xla"), default="kernel")
    parser.add_argument("--norm", choices=("kernel", "halves"), default="kernel")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--situations", type=int, default=200)
    parser.add_argument("--off-situations", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=180, help="bits and off end after so many")
    parser.add_argument("--most-company", type=int, default=511)
    parser.add_argument("--most-rows", type=int, default=8192, help="of ops")
    parser.add_argument("--longest", type=int, default=1500, help="prompt tokens of a compared request")
    parser.add_argument("--targets", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=8, help="differences listed")
    parser.add_argument("--decode", default="1,8,32,64,128,256", help="row counts of cost")
    parser.add_argument("--prefill", default="1x512,1x2048,16x2048", help="rows x tokens of cost")
    parser.add_argument("--prompt", type=int, default=512, help="context of the decoding rows of cost")
    parser.add_argument("--throughput", type=int, default=1, help="workloads of cost: 0 to 2")
    parser.add_argument(
        "--profile", default="", help="rows, and rows x tokens, profiled after cost: 64,1x8192"
    )
    parser.add_argument("--top", type=int, default=14, help="kernels that a profile names")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths of cost")
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON of further LLM arguments")
    parser.add_argument("--modes", default="on,off")
    parser.add_argument("--save", type=Path, help="a file for the results, as JSON")
    parser.add_argument("--compare", type=Path, nargs=2, help="print what such files say, and end")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs")
    parser.add_argument("--worker", choices=("ops", *WORKERS), help=argparse.SUPPRESS)
    parser.add_argument("--expected", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

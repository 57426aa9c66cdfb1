"""Tensor, expert and data parallelism on the GPUs of one host: the same tokens as one GPU's, and how much faster.

    python benchmarks/parallel.py                             # every case, on two GPUs: about nine minutes
    python benchmarks/parallel.py --cases tokens decode --devices 4
    python benchmarks/parallel.py --cases tokens --model tiny/ --moe-model tiny-moe/ --prompt 16 --tokens 8   # on a CPU

Weights are random (``--load-format dummy``), the same whatever the mesh. Every engine has a process of its own; those
that need one GPU run side by side.

    tokens    float32: greedy tokens of N devices equal one device's. bfloat16: log probabilities of the 20 likeliest
              first tokens, as far apart as stated. Dense (tp), experts (tp with expert parallelism), and data parallel
    decode    ms a step at 1, 32 and 256 rows and of prefill, 16 x 2,048, on 1 and N devices
    moe       the same for experts at 256 rows
    large     a 70B shape on N devices beside its bandwidth floor
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

CASES = ("tokens", "decode", "moe", "large")
SMALL = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512}
"""An engine for the comparison of tokens: few programs, so that it starts soon."""
TOP = 20


@dataclass(frozen=True)
class Run:
    """One engine and what it does.

    Args:
        name: in tables.
        model: a folder with a config.json.
        arguments: of ``LLM``.
        rows, prefill: timed cases; neither: tokens are compared.
    """

    name: str
    model: str
    arguments: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()

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
        "--moe-layers", type=int, default=24, help="of the float32 comparison, to fit one GPU"
    )
    parser.add_argument("--prompt", type=int, default=200, help="longest prompt of the comparison")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens compared")
    parser.add_argument("--limit", type=int, default=240, help="seconds for one engine")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Run(**options.worker), options)
        return 0
    results: dict[str, Any] = {}
    failed = False
    for case in options.cases:
        began = time.monotonic()
        results |= run_all(plan(case, options), options)
        failed |= not REPORTS[case](results, options)
        print(f"# {case}: {time.monotonic() - began:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    return int(failed)


def plan(case: str, options: argparse.Namespace) -> list[Run]:
    """The engines of a case, those of one device first."""
    n = options.devices
    tensor, experts = {"tensor_parallel_size": n}, {"tensor_parallel_size": n, "enable_expert_parallel": True}
    if case == "tokens":
        exact, rounded = {**SMALL, "dtype": "float32"}, {**SMALL, "dtype": "bfloat16"}
        few = {"hf_overrides": {"num_hidden_layers": options.moe_layers}}
        dense, moe = options.model, options.moe_model
        return [
            Run("dense float32 1", dense, exact), Run("moe float32 1", moe, {**exact, **few}),
            Run("dense bfloat16 1", dense, rounded), Run("moe bfloat16 1", moe, rounded),
            Run("dense float32 tp", dense, {**exact, **tensor}), Run("dense bfloat16 tp", dense, {**rounded, **tensor}),
            Run("dense float32 dp", dense, {**exact, "data_parallel_size": n}),
            Run("moe float32 ep", moe, {**exact, **few, **experts}),
            Run("moe bfloat16 ep", moe, {**rounded, **experts}),
            Run("moe float32 dp ep", moe, {**exact, **few, "data_parallel_size": n, "enable_expert_parallel": True}),
        ]  # fmt: skip
    if case == "decode":
        timed: dict[str, Any] = {"rows": (1, 32, 256), "prefill": ((16, 2048),)}
        return [Run("dense 1", options.model, {}, **timed), Run("dense tp", options.model, tensor, **timed)]
    if case == "moe":
        return [
            Run("moe 1", options.moe_model, {}, rows=(256,)),
            Run("moe ep", options.moe_model, experts, rows=(256,)),
        ]
    return [Run("large tp", options.large_model, {**tensor, "max_num_seqs": 64}, rows=(1, 64))]


def run_all(runs: list[Run], options: argparse.Namespace) -> dict[str, Any]:
    """Name -> what each engine's process reported, or ``{"error": ...}``."""
    results: dict[str, Any] = {}
    single = [run for run in runs if run.devices == 1]
    for at in range(0, len(single), options.devices):
        batch = single[at : at + options.devices]
        started = [start(run, options, device) for device, run in enumerate(batch)]
        results |= {run.name: finish(*each, options) for run, each in zip(batch, started, strict=True)}
    for run in runs:
        if run.devices > 1:
            results[run.name] = finish(*start(run, options, None), options)
    return results


def start(run: Run, options: argparse.Namespace, device: int | None) -> tuple[subprocess.Popen[bytes], Any]:
    """A worker, on one device or on all."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    flags = environment.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={max(1, run.devices)}"
    command = [sys.executable, __file__, "--worker", json.dumps(vars(run)), "--prompt", str(options.prompt)]
    out = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = subprocess.Popen(
        [*command, "--tokens", str(options.tokens)], stdout=out, stderr=subprocess.STDOUT, env=environment
    )
    return process, out


def finish(process: subprocess.Popen[bytes], out: Any, options: argparse.Namespace) -> dict[str, Any]:
    try:
        code = str(process.wait(options.limit))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = f"stopped after {options.limit} s"
    out.seek(0)
    lines = out.read().splitlines()
    for line in lines:
        if line.startswith('{"result"'):
            return json.loads(line)["result"]
    print("\n".join(lines[-6:]), flush=True)
    return {"error": f"{code}: {lines[-1] if lines else 'no output'}"}


def work(run: Run, options: argparse.Namespace) -> None:
    """In a process of its own: start the engine, do what ``run`` says, print it as JSON."""
    from offline import MODELS, Engine

    folder = MODELS / run.model if (MODELS / run.model).is_dir() else Path(run.model)
    config = json.loads((folder / "config.json").read_text())
    engine = Engine("jaxserve", folder, {"max_model_len": 8192, **run.arguments})
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
    from offline import OUTPUT, PROMPT

    def prompts(rows: int, tokens: int) -> list[list[int]]:
        return [rng.integers(8, config["vocab_size"], tokens).tolist() for _ in range(rows)]

    engine.run(prompts(2, 64), [8] * 2)
    result: dict[str, Any] = {"decode": {}, "prefill": {}}
    for rows in run.rows:
        first, whole = (engine.run(prompts(rows, PROMPT), [n] * rows) for n in (1, OUTPUT))
        result["decode"][str(rows)] = 1e3 * (whole - first) / (OUTPUT - 1)
    for rows, tokens in run.prefill:
        times = sorted(engine.run(prompts(rows, tokens), [1] * rows) for _ in range(3))
        result["prefill"][f"{rows} x {tokens}"] = 1e3 * times[1]
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
    from offline import MODELS, OUTPUT, PROMPT, Shape

    found = results["large tp"]
    if "error" in found:
        print(f"large      FAILED {found['error']}")
        return False
    folder = MODELS / options.large_model
    shape = Shape.of(json.loads((folder / "config.json").read_text()))
    for rows, ms in found["decode"].items():
        floor = 1e3 * shape.decode_floor(int(rows), PROMPT + OUTPUT / 2) / options.devices
        print(
            f"large      decode {rows:10s} {ms:9.2f} ms on {options.devices}, floor {floor:.2f}: {ms / floor:.2f} x"
        )
    print(f"large      ready after {found['ready']:.0f} s", flush=True)
    return True


REPORTS = {"tokens": report_tokens, "decode": report_times, "moe": report_times, "large": report_large}


if __name__ == "__main__":
    sys.exit(main())

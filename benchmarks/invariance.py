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
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import profile_step
from offline import Benchmark, Engine
from parts import Parts, clean_up_when_ended, verdict

from jaxserve import LLM, SamplingParams
from jaxserve.bench.invariance import Bits, Target, bits_of

MODELS = Path(__file__).parent / "models"
COMPANY = (0, 1, 1, 3, 3, 7, 7, 20, 20, 60, 200, 511)
"""Other requests of a situation, drawn evenly."""
BUDGETS = (64, 100, 256, 1000, 1 << 20)
COST = {"1 rows": 0.90}
"""Words of a case: how fast it is with the mode on, as a share, at least; of all others ``LEAST``."""
LEAST = 0.97
PREEMPTED = 0.15
"""Of the steps of a situation with preemptions, those before which a request loses its blocks."""


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


# --- bits -------------------------------------------------------------------------------------------------------


class Disturbance:
    """Stands in for a core's ``step``: preempts, and changes the budget and the depth, as a situation has it."""

    def __init__(self, core: Any, rng: random.Random) -> None:
        self._step, self._core, self._rng, self._depth = core.step, core, rng, core._depth
        self._most = core.scheduler._planner.max_num_batched_tokens
        self.preempts = False
        self.preemptions = 0
        core.step = self.step

    def step(self) -> Any:
        scheduler = self._core.scheduler
        rank = scheduler._lifecycle.ranks[0]
        if self.preempts and len(rank.running) > 1 and self._rng.random() < PREEMPTED:
            rank.running.append(rank.running.pop(self._rng.randrange(len(rank.running))))
            scheduler._lifecycle.preempt_last(rank)
            self.preemptions += 1
        return self._step()

    def end(self) -> None:
        """Leave the core as it was."""
        self._core.step, self._core._depth = self._step, self._depth
        self._core.scheduler._planner.max_num_batched_tokens = self._most

    def next_situation(self, num_requests: int) -> str:
        """Draw what happens to it."""
        # Each running request has a token of the budget.
        budget = min(max(self._rng.choice(BUDGETS), num_requests + 8), self._most)
        self._core.scheduler._planner.max_num_batched_tokens = budget
        self._core._depth = self._rng.choice([1, 2, 2])
        self.preempts = self._rng.random() < 0.5
        return f"{budget} tokens a step, depth {self._core._depth}{', preempting' * self.preempts}"


@dataclass
class Differences:
    """What came of comparisons."""

    requests: int = 0
    different: int = 0
    other_tokens: int = 0
    values: int = 0
    other_values: int = 0
    examples: list[str] = field(default_factory=list)

    def compare(self, output: Any, expected: Bits, where: str) -> None:
        found = bits_of(output)
        self.requests += 1
        self.values += len(expected[1])
        if found == expected:
            return
        self.different += 1
        self.other_tokens += found[0] != expected[0]
        places = [i for i, (a, b) in enumerate(zip(found[1], expected[1], strict=False)) if a != b]
        self.other_values += len(places)
        first = places[0] if places else len(expected[1])
        prompt = len(output.prompt_logprobs or [])
        distances = [
            abs(float.fromhex(a[1]) - float.fromhex(b[1]))
            for a, b in zip(found[1][first], expected[1][first], strict=False)
        ]
        self.examples.append(
            f"prompt of {len(output.prompt_token_ids)}, first at {first} of {len(expected[1])} positions"
            f" ({prompt} of the prompt), by {max(distances, default=0):.2e}, {output.num_cached_tokens} cached: {where}"
        )

    def line(self) -> str:
        return (
            f"{self.requests} requests compared, {self.different} differ ({self.other_tokens} in their tokens); "
            f"{self.other_values} of {self.values} positions"
        )


def make_targets(rng: random.Random, vocab: int, longest: int, count: int) -> list[Target]:
    """Prompts of 1 to ``longest`` tokens; greedy, random and penalised; some score their prompts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.2},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    targets: list[Target] = []
    for index in range(count):
        length = max(1, int(longest ** rng.random())) if index else longest
        prompt = [rng.randrange(8, vocab) for _ in range(length)]
        params = SamplingParams(
            max_tokens=rng.randint(2, 24), ignore_eos=True, seed=index, logprobs=3, detokenize=False,
            **kinds[index % len(kinds)],
        )  # fmt: skip
        targets.append(Target(prompt, params))
    return targets


def run(llm: LLM, requests: list[Target]) -> list[Any]:
    prompts: list[Any] = [{"prompt_token_ids": request.prompt} for request in requests]
    return llm.generate(prompts, [request.params for request in requests], use_tqdm=False)


def alone(llm: LLM, targets: list[Target]) -> list[tuple[Target, Bits]]:
    """Each by itself with nothing cached, and its prompt with most of its answer."""
    expected: list[tuple[Target, Bits]] = []
    for target in targets:
        llm.reset_prefix_cache()
        [output] = run(llm, [target])
        expected.append((target, bits_of(output)))
        if target.params.prompt_logprobs is None:
            llm.reset_prefix_cache()
            longer = Target(target.prompt + list(output.outputs[0].token_ids)[:-1], target.params)
            expected.append((longer, bits_of(run(llm, [longer])[0])))
    return expected


def keep(expected: list[tuple[Target, Bits]], path: Path) -> None:
    """Write requests and what they gave."""
    rows = [{"prompt": target.prompt, "seed": target.params.seed, "bits": bits} for target, bits in expected]
    path.write_text(json.dumps(rows))


def kept(path: Path, targets: list[Target]) -> list[tuple[Target, Bits]]:
    """What ``keep`` wrote of these targets, which have their places as seeds."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    rows = json.loads(path.read_text())
    return [(Target(row["prompt"], targets[row["seed"]].params), tuples(row["bits"])) for row in rows]


def try_restart(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """The requests of another process alone, in this one."""
    targets = make_targets(random.Random(options.seed), llm.info.vocab_size, options.longest, options.targets)
    found = Differences()
    for target, bits in kept(options.expected, targets):
        llm.reset_prefix_cache()
        found.compare(run(llm, [target])[0], bits, "restart")
    print(f"restart: {found.line()} ({verdict(found.different, 0)})", flush=True)
    return {"requests": found.requests, "different": found.different, "other tokens": found.other_tokens}


def companions(
    rng: random.Random, expected: list[tuple[Target, Bits]], vocab: int, count: int
) -> list[Target]:
    """Requests that nobody compares: short and long, some with a target's beginning."""
    others: list[Target] = []
    longest = len(expected[0][0].prompt)
    for _ in range(count):
        length = min(longest, rng.choice([1, 5, 17, 40, 40, 130, 600 if count < 100 else 60]))
        prompt = [rng.randrange(8, vocab) for _ in range(length)]
        if rng.random() < 0.2:
            shared = rng.choice(expected)[0].prompt
            prompt = shared[: rng.randint(1, len(shared))] + prompt[:5]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]), max_tokens=rng.randint(1, 24), ignore_eos=True,
            seed=rng.randrange(1 << 30), logprobs=rng.choice([None, None, None, 1]), detokenize=False,
        )  # fmt: skip
        others.append(Target(prompt, params))
    return others


def try_situations(llm: LLM, options: argparse.Namespace, situations: int, *, mode: str) -> dict[str, Any]:
    """Targets in random situations against themselves alone."""
    rng, vocab = random.Random(options.seed), llm.info.vocab_size
    targets = make_targets(rng, vocab, options.longest, options.targets)
    started = time.perf_counter()
    expected = alone(llm, targets)
    if options.expected is not None and mode == "on":
        keep(expected, options.expected)
    print(
        f"mode {mode}: {len(expected)} requests alone after {time.perf_counter() - started:.0f} s", flush=True
    )
    disturbance, found = Disturbance(llm._core, rng), Differences()
    cached = most = done = 0
    try:
        while done < situations and time.perf_counter() - started < options.seconds:
            size = min(rng.choice(COMPANY), options.most_company)
            chosen = [rng.choice(expected) for _ in range(rng.choice([1, 1, 2, 5]))]
            requests = [target for target, _ in chosen] + companions(rng, expected, vocab, size)
            order = rng.sample(range(len(requests)), len(requests))
            if cold := rng.random() < 0.4:
                llm.reset_prefix_cache()
            drawn = disturbance.next_situation(len(requests))
            where = f"situation {done}, {size} others, {drawn}{', cold' * cold}"
            outputs = run(llm, [requests[index] for index in order])
            most = max(most, len(requests))
            for place, index in enumerate(order):
                if index < len(chosen):
                    cached += outputs[place].num_cached_tokens
                    found.compare(outputs[place], chosen[index][1], where)
            done += 1
            if done % 25 == 0:
                print(f"  {done} situations, {found.line()}", flush=True)
    finally:
        disturbance.end()
        print(
            f"mode {mode}: {done} situations of up to {most} requests in {time.perf_counter() - started:.0f} s, "
            f"{disturbance.preemptions} preemptions, {cached} tokens of compared prompts from the cache\n"
            f"  {found.line()}"
        )
        for example in found.examples[: options.examples]:
            print(f"  {example}")
        sys.stdout.flush()
    if mode == "on":
        print(
            f"situations {done} {verdict(done, situations, least=True)}; "
            f"requests that differ {found.different} {verdict(found.different, 0)}",
            flush=True,
        )
    return {
        "situations": done, "most requests": most, "preemptions": disturbance.preemptions, "cached tokens": cached,
        "requests": found.requests, "different": found.different, "other tokens": found.other_tokens,
        "positions": found.values, "other positions": found.other_values,
    }  # fmt: skip


# --- operations -------------------------------------------------------------------------------------------------


def try_operations(options: argparse.Namespace) -> None:
    """Each operation's first row among more and more rows: how many kinds of bits there are."""
    import jax
    import jax.numpy as jnp

    from jaxserve.layers.linear import linear
    from jaxserve.layers.rope import RopeAngles
    from jaxserve.runner.invariance import PINNED_PRODUCTS
    from pallas_kernels.dense_matmul.dispatch import dense_matmul_of
    from pallas_kernels.rms_norm.dispatch import PLAIN, HalvesNorm, fixed_norm

    config = json.loads((MODELS / "llama-8b" / "config.json").read_text())
    if (MODELS / options.model).is_dir():
        config = json.loads((MODELS / options.model / "config.json").read_text())
    hidden, head, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    rows = [n for n in (8, 16, 64, 192, 256, 512, 2048, 8192) if n <= options.most_rows]
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.5, jnp.bfloat16)

    x, wide = draw(rows[-1], hidden), draw(rows[-1], 2 * ffn)
    weight, qk = draw(hidden), draw(rows[-1], 1, heads + 1, head)
    positions = jnp.asarray(rng.integers(0, 9999, rows[-1]), jnp.int32)
    frequencies = (500000.0 ** -(np.arange(0, head, 2) / head)).astype(np.float32)

    def rotate(qk: Any, positions: Any) -> Any:
        return RopeAngles.at(positions, frequencies, 1.0).rotate(qk)

    def activate(wide: Any) -> Any:
        halves = wide.reshape(len(wide), 2, -1).astype(jnp.float32)
        return (jax.nn.silu(halves[:, 0]) * halves[:, 1]).astype(wide.dtype)

    pinned = dict(PINNED_PRODUCTS) if jax.default_backend() == "gpu" else {}
    cases: list[tuple[str, Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = [
        (f"norm of {hidden}, {name}", lambda x, w, norm=norm: norm(x, w, 1e-5), (x,), (weight,), pinned)
        for name, norm in (
            ("plain", PLAIN), ("halves", HalvesNorm()), ("kernel", fixed_norm(jax.default_backend())),
        )
    ]  # fmt: skip
    per_head = draw(heads + 1, head)
    cases += [
        (f"norm of heads, {head}, plain", lambda x, w: PLAIN(x, w, 1e-5), (qk,), (per_head,), pinned),
        (f"norm of heads, {head}, halves", lambda x, w: HalvesNorm()(x, w, 1e-5), (qk,), (per_head,), pinned),
        ("rotation", rotate, (qk, positions), (), pinned),
        ("activation", activate, (wide,), (), pinned),
    ]
    kernel = dense_matmul_of(jax.default_backend())[0]
    shapes = (
        (hidden, 2 * ffn),
        (ffn, hidden),
        (hidden, heads * head * 3 // 2),
        (hidden, config["vocab_size"] // 4),
    )
    for inner, outputs in shapes:
        operand, matrix = draw(rows[-1], inner), draw(outputs, inner)
        named = f"product {inner} x {outputs}"
        cases.append((f"{named}, timed", linear, (operand,), (matrix,), {}))
        cases.append((f"{named}, pinned", linear, (operand,), (matrix,), pinned))
        if kernel is not None:
            always = partial(linear, kernel=kernel.for_all_rows())
            cases.append((f"{named}, kernel", always, (operand,), (matrix,), pinned))
    print(f"operations, first rows among {', '.join(map(str, rows))}: kinds of bits")
    jobs: list[tuple[str, int, tuple[Any, ...], Any]] = []
    with ThreadPoolExecutor(16) as pool:
        for name, function, batched, fixed, compiler_options in cases:
            for count in rows:
                arguments = (*(each[:count] for each in batched), *fixed)
                lowered = jax.jit(function).lower(*arguments)
                compiling = pool.submit(partial(lowered.compile, compiler_options=compiler_options))
                jobs.append((name, count, arguments, compiling))
    kinds: dict[str, dict[bytes, list[int]]] = {}
    for name, count, arguments, compiling in jobs:
        first = np.asarray(compiling.result()(*arguments)[:8].astype(jnp.float32))
        kinds.setdefault(name, {}).setdefault(first.tobytes(), []).append(count)
    for name, groups in kinds.items():
        listed = " | ".join(",".join(map(str, counts)) for counts in groups.values())
        print(f"  {name:38s} {len(groups)}   {'' if len(groups) == 1 else listed}", flush=True)


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

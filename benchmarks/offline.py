"""Steady decode, prefill and offline throughput through the public LLM class, with dummy weights.

Prints each case's figure, its target and whether it is met, its floor (bytes over the memory bandwidth for decode,
operations over the matrix rate for prefill, both for throughput) and the ratio to it, the ratio to the peer's figure
where one is known, and tokens a second. ``--engine vllm`` runs the same cases through an installed vLLM, so that both
can be measured in one run: with ``--peer`` and what that wrote, ratios are to its figures instead of the table's.
``--repeats 2`` runs each case twice and prints both: a kernel that is compiled when it is first needed, as some of the
peer's are, takes its time from the first. ``--steps`` adds where each case's time went, by kind and padded size of
step: steps, ms a step (from when the device could begin it to when its tokens were read), the share of it, live tokens,
the share of padding, and what the host took beside waiting; ``decode 4x`` is a dispatch of four decode steps.

    python benchmarks/offline.py --model llama-8b --decode 1,8,64 --prefill 1x2048 --throughput
    python benchmarks/offline.py --model llama-8b --all --steps --profile 1,64,1x8192  # all that one model is asked for
    python benchmarks/offline.py --model llama-8b --peer-settings --prefill 16x2048 --throughput

Seconds of 8B on an H200: start 38 to 56 with an empty compile cache (it is the processors'), 7 to 10 with a warm one;
decode 30 for all row counts (256 alone 15); prefill 7 for all; throughput 25 a workload, greedy and sampled; a profile
5, of 256 rows 14. 0.6B: a third of that and 45 to 60 to start; 30B-A3B: as 8B, and 81 (128 rows) to 126 to start. A
case that fails or takes longer than ``--limit`` costs only itself. ``--xla-products`` and ``--split-heads`` change what
programs hold: give each its own JAXSERVE_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from parts import Parts

MODELS = Path(__file__).parent / "models"
BANDWIDTH = 4.3e12
"""Bytes a second that a copy reaches on an H200."""
MATRIX_RATE = 790e12
"""bfloat16 operations a second that a large product reaches on an H200."""
PROMPT, OUTPUT = 1024, 129
THROUGHPUT = {"512 in / 256 out": (512, 512, 256), "128 in / 128 out": (1024, 128, 128)}
"""Name -> requests, mean prompt tokens, mean output tokens; lengths are uniform, 50 % either way."""
PEER = {
    "llama-8b": {
        "decode": {1: 4.95, 8: 5.25, 32: 6.24, 64: 7.79, 128: 10.9, 256: 18.8},
        "prefill": {(1, 512): 16.3, (1, 2048): 53.5, (1, 8192): 219, (16, 2048): 787},
        "throughput": {"512 in / 256 out": 9676, "128 in / 128 out": 15434},
    },
    "qwen3-0.6b": {
        "decode": {1: 1.83, 8: 2.20, 32: 3.21, 64: 3.87, 128: 5.97, 256: 10.8},
        "prefill": {(1, 512): 11.3, (1, 2048): 25, (1, 8192): 35, (16, 2048): 91},
        "throughput": {"512 in / 256 out": 27982, "128 in / 128 out": 20730},
    },
    "qwen3-30b-a3b": {
        "decode": {1: 4.20, 8: 9.44, 32: 16.6, 64: 19.3, 128: 21.2, 256: 27.4},
        "throughput": {"512 in / 256 out": 9534, "128 in / 128 out": 8661},
    },
}
"""vLLM 0.25.0 on one H200, 2026-11-29: ms a step, ms, output tokens a second."""
PEER_SAMPLED = {
    "llama-8b": {"512 in / 256 out": 9429, "128 in / 128 out": 15792},
    "qwen3-0.6b": {"512 in / 256 out": 26113, "128 in / 128 out": 21873},
}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
TARGETS = {
    "llama-8b": {
        "decode": {1: 4.0, 8: 4.3, 32: 5.2, 64: 6.5, 128: 9.0, 256: 14.5},
        "prefill": {(1, 512): 12.5, (1, 2048): 46, (1, 8192): 190, (16, 2048): 690},
        "throughput": {"512 in / 256 out": 12000, "128 in / 128 out": 20000},
        "start": {"empty": 40.0, "warm": 12.0},
    },
    "qwen3-0.6b": {
        "decode": {1: 1.1, 8: 1.2, 32: 2.0, 64: 2.9, 128: 4.9, 256: 8.9},
        "prefill": {(1, 512): 4, (1, 2048): 7, (1, 8192): 26, (16, 2048): 66},
        "throughput": {"512 in / 256 out": 42000, "128 in / 128 out": 50000},
    },
    "qwen3-30b-a3b": {
        "decode": {1: 2.2, 8: 7.6, 32: 14.8, 64: 17.3, 128: 19.4, 256: 23.5},
        "throughput": {"512 in / 256 out": 12500, "128 in / 128 out": 14000},
    },
}
"""On one H200: at most so many ms, at least so many tokens a second; at most so many seconds to start."""
PEER_SETTINGS = {"max_num_seqs": 1024, "max_num_batched_tokens": 16384}
"""What the peer's figures were measured with."""
EVERYTHING = {"decode": "1,8,32,64,128,256", "prefill": "1x512,1x2048,1x8192,16x2048"}
CACHE_APART = 3.0
"""Percent by which the cache may differ from its plan."""
SAMPLED_SHARE = 0.97
"""Sampled tokens a second over greedy ones, at least."""


@dataclass(frozen=True)
class Shape:
    """What the floors follow from. Of experts: how many there are, how many a token takes, parameters of one.
    ``ffn``: width of a dense layer's activation."""

    matrix_params: int
    head_params: int
    layers: int
    query_width: int
    kv_width: int
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    hidden: int = 0
    ffn: int = 0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        query = config["num_attention_heads"] * config["head_dim"]
        kv = config["num_key_value_heads"] * config["head_dim"]
        attention, head = hidden * (2 * query + 2 * kv), hidden * config["vocab_size"]
        if experts := config.get("num_experts", 0):
            expert = 3 * hidden * config["moe_intermediate_size"]
            dense = layers * (attention + hidden * experts)
            return cls(dense, head, layers, query, kv, experts, config["num_experts_per_tok"], expert, hidden)
        layer = attention + 3 * hidden * config["intermediate_size"]
        return cls(layers * layer, head, layers, query, kv, hidden=hidden, ffn=config["intermediate_size"])

    def decode_floor(self, rows: int, context: float) -> float:
        """Seconds: weights once (of experts those that rows choose, at random), every row's keys and values once, in
        two bytes each."""
        cache = rows * context * 2 * self.kv_width * self.layers
        touched = 0.0
        if self.experts:
            touched = self.experts * (1 - (1 - self.experts_per_token / self.experts) ** rows)
        weights = self.matrix_params + self.head_params + self.layers * touched * self.expert_params
        return 2 * (weights + cache) / BANDWIDTH

    def prefill_operations(self, rows: int, tokens: int) -> tuple[float, float]:
        """Of all products with logits of the last token; of the causal half of attention."""
        params = self.matrix_params + self.layers * self.experts_per_token * self.expert_params
        products = 2 * (params * rows * tokens + self.head_params * rows)
        return products, 2 * rows * tokens * tokens * self.query_width * self.layers

    def prefill_floor(self, rows: int, tokens: int) -> float:
        """Seconds: all products, the causal half of attention, logits of the last token."""
        return sum(self.prefill_operations(rows, tokens)) / MATRIX_RATE

    def moving_floors(self, tokens: int) -> dict[str, float]:
        """Seconds, by name, of what is no product and no attention, each in a pass of its own that reads and writes
        everything once in two bytes: norms with their sums, rotating heads, activation, the cache's update."""
        moved = {
            "norms": 8 * self.hidden, "heads": 2 * (self.query_width + 2 * self.kv_width), "activation": 3 * self.ffn,
            "cache": 4 * self.kv_width,
        }  # fmt: skip
        return {name: 2 * tokens * self.layers * each / BANDWIDTH for name, each in moved.items()}

    def throughput_floor(self, prompts: Sequence[int], outputs: Sequence[int], rows: int) -> float:
        """Seconds: each prompt's prefill, and decode steps of ``rows`` rows that read what they hold on average."""
        prefill = sum(self.prefill_floor(1, n) for n in prompts)
        tokens = sum(outputs)
        held = sum(n * (prompt + n / 2) for prompt, n in zip(prompts, outputs, strict=True)) / tokens
        return prefill + tokens / rows * self.decode_floor(rows, held)


class StepLog:
    """Notes every step of jaxserve's engine: what it held, the shape it ran in, the time of device and host."""

    def __init__(self, llm: Any) -> None:
        core = llm._core
        self._step, self._execute = core.step, core.runner.execute
        self._running: collections.deque[tuple[str, int, int]] = collections.deque()
        """Of each dispatch that was not read yet: its kind, rows, and decode steps."""
        self._seen: dict[tuple[str, int], list[Any]] = {}
        self._full: dict[int, list[float]] = {}
        core.step, core.runner.execute = self.step, self.execute

    def execute(self, scheduled: Any) -> Any:
        pending = self._execute(scheduled)
        rows, steps = len(scheduled.num_scheduled_tokens), getattr(scheduled, "num_decode_steps", 1)
        kind = "decode" if scheduled.num_decode_rows == rows else "mixed"
        self._running.append((kind if steps == 1 else f"{kind} {steps}x", rows, steps))
        return pending

    def step(self) -> Any:
        outputs = self._step()
        stats = outputs.stats
        if stats.step_padded_tokens:  # one was read
            kind, rows, steps = self._running.popleft()
            self._seen.setdefault((kind, stats.step_padded_tokens), []).append(
                (stats.step_device_seconds, stats.step_padding_tokens, stats.step_host_seconds)
            )
            if kind.startswith("decode"):
                self._full.setdefault(rows, []).append(stats.step_device_seconds / steps)
        return outputs

    def clear(self) -> None:
        self._seen.clear()
        self._full.clear()

    def full_decodes(self, rows: int) -> list[float]:
        """Seconds of each step that decoded so many rows and nothing else; of several in one dispatch their mean."""
        return self._full.get(rows, [])

    def report(self) -> None:
        """Print what was noted since ``clear``."""
        if not self._seen:
            return
        total = sum(each[0] for steps in self._seen.values() for each in steps)
        tokens = sum(size * len(steps) for (_, size), steps in self._seen.items())
        padding = sum(each[1] for steps in self._seen.values() for each in steps)
        for (kind, size), steps in sorted(self._seen.items()):
            seconds, pads, host = (list(column) for column in zip(*steps, strict=True))
            mean, padded = statistics.mean(seconds), sum(pads) / (size * len(steps))
            line = f"    {kind:10s} {size:6d}  {len(steps):5d} steps x {1e3 * mean:8.2f} ms"
            line += f" = {sum(seconds) / max(total, 1e-9):5.1%}  live {size - statistics.mean(pads):8.1f}"
            print(f"{line}  padding {padded:5.1%}  host {1e3 * statistics.mean(host):6.2f} ms")
        print(
            f"    all: {total:.2f} s in steps, padding {padding / max(tokens, 1):.1%} of {tokens:,} tokens",
            flush=True,
        )


class Engine:
    """jaxserve's LLM, or vLLM's, behind the few calls that the cases need."""

    def __init__(self, name: str, model: Path, arguments: dict[str, Any], *, steps: bool = False) -> None:
        started = time.perf_counter()
        shared = {
            "skip_tokenizer_init": True, "load_format": "dummy", "enable_prefix_caching": False, "max_model_len": 16384,
            **arguments,
        }  # fmt: skip
        if name == "jaxserve":
            from jaxserve import LLM, SamplingParams
        else:
            from vllm import LLM, SamplingParams
        self.params, self.name = SamplingParams, name
        self.llm = LLM(str(model), **shared)
        self.startup = time.perf_counter() - started
        if name == "jaxserve":
            scheduler = self.llm._core.scheduler.config
        else:
            scheduler = self.llm.llm_engine.vllm_config.scheduler_config
        self.rows: int = scheduler.max_num_seqs
        """Rows of a step, at most."""
        self.steps = StepLog(self.llm) if steps else None

    def run(self, prompts: list[list[int]], max_tokens: list[int], **params: Any) -> float:
        """Seconds for all of them."""
        sampling = [
            self.params(**{"temperature": 0, **params}, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in max_tokens
        ]
        requests = prompts if self.name == "jaxserve" else [{"prompt_token_ids": p} for p in prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(o.outputs[0].token_ids) for o in outputs] == max_tokens
        return seconds


class Benchmark:
    """Runs cases and prints a line for each."""

    def __init__(
        self, engine: Engine, model: str, config: dict[str, Any], scale: int, peer: Path | None = None
    ) -> None:
        """``peer``: what ``--output`` wrote of another engine."""
        cases = [] if peer is None else json.loads(peer.read_text())
        self.measured = None if peer is None else {each["case"]: each.get("value") for each in cases}
        self.engine, self.shape, self.scale = engine, Shape.of(config), scale
        self.vocab = config["vocab_size"]
        self.peer, self.targets = PEER.get(model, {}), TARGETS.get(model, {})
        self.peer_sampled = PEER_SAMPLED.get(model, {})
        self.rng = np.random.default_rng(0)
        self.results: list[dict[str, Any]] = []

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        return [self.rng.integers(8, self.vocab, n).tolist() for n in lengths]

    def report(
        self, case: str, value: float, unit: str, *, target: float | None = None, floor: float | None = None,
        peer: float | None = None, rate: float | None = None,
    ) -> None:  # fmt: skip
        """Print a case; small values are good but for rates and ratios. ``rate``: tokens a second."""
        line, met = f"{case:34s} {value:10.2f} {unit:8s}", None
        if self.measured is not None:
            peer = self.measured.get(case) if unit else None  # no ratio of ratios
        if rate is not None:
            line += f" {rate:9.0f} tokens/s"
        if target is not None and self.scale == 1:
            met = value >= target if unit in ("tokens/s", "") else value <= target
            line += f" target {target:8.2f} {'met   ' if met else 'MISSED'}"
        if floor is not None:
            line += f" floor {floor:8.2f} x{value / floor:5.2f}"
        if peer is not None:
            line += f"  peer {peer:9.2f} x{value / peer:5.2f}"
        print(line, flush=True)
        if self.engine.steps is not None and unit:
            self.engine.steps.report()
        self.results.append({
            "case": case, "value": value, "unit": unit, "target": target, "met": met, "floor": floor, "peer": peer,
        })  # fmt: skip

    def summary(self) -> None:
        last = {each["case"]: each for each in self.results}
        judged = [each for each in last.values() if each["met"] is not None]
        missed = [each["case"] for each in judged if not each["met"]]
        if judged:
            print(
                f"{len(judged) - len(missed)} of {len(judged)} targets met; missed: {', '.join(missed) or 'none'}"
            )

    def clear_steps(self) -> None:
        if self.engine.steps is not None:
            self.engine.steps.clear()

    def start(self, state: str | None) -> None:
        """Seconds until the engine was ready, with a compile cache that was ``empty`` or ``warm``."""
        target = self.targets.get("start", {}).get(state)
        self.report(f"start, {state or 'some'} compile cache", self.engine.startup, "s", target=target)

    def cache(self, allocated: int, planned: int) -> None:
        """Tokens of the KV cache beside those of the plan."""
        print(f"KV cache: {allocated:,} tokens allocated, {planned:,} planned")
        apart = 100 * abs(allocated / planned - 1)
        self.report("cache, allocated against planned", apart, "% apart", target=CACHE_APART)

    def decode(self, rows: int) -> None:
        """(t(129 tokens) - t(1 token)) / 128."""
        length, output = PROMPT // self.scale, (OUTPUT - 1) // self.scale + 1
        times = []
        for max_tokens in (1, output):
            prompts = self.prompts([length] * rows)
            self.clear_steps()
            times.append(self.engine.run(prompts, [max_tokens] * rows))
        step = (times[1] - times[0]) / (output - 1)
        floor = self.shape.decode_floor(rows, length + output / 2)
        self.report(
            f"decode, {rows} rows", 1e3 * step, "ms", target=self.targets.get("decode", {}).get(rows),
            floor=1e3 * floor, peer=self.peer.get("decode", {}).get(rows), rate=rows / step,
        )  # fmt: skip

    def prefill(self, rows: int, tokens: int) -> None:
        self.clear_steps()
        times = [self.engine.run(self.prompts([tokens] * rows), [1] * rows) for _ in range(5)]
        floor, seconds = 1e3 * self.shape.prefill_floor(rows, tokens), statistics.median(times)
        self.report(
            f"prefill, {rows} x {tokens}", 1e3 * seconds, "ms", rate=rows * tokens / seconds,
            target=self.targets.get("prefill", {}).get((rows, tokens)), floor=floor,
            peer=self.peer.get("prefill", {}).get((rows, tokens)),
        )  # fmt: skip

    def throughput(self, name: str) -> None:
        """Greedy, then sampled, and the ratio of the two."""
        greedy, sampled = self._throughput(name, sampled=False), self._throughput(name, sampled=True)
        self.report(f"{name}, sampled / greedy", sampled / greedy, "", target=SAMPLED_SHARE)

    def _throughput(self, name: str, *, sampled: bool) -> float:
        requests, prompt, output = (n // self.scale for n in THROUGHPUT[name])
        rng = np.random.default_rng(1)
        lengths = rng.integers(prompt // 2, prompt * 3 // 2 + 1, requests).tolist()
        outputs = rng.integers(output // 2, output * 3 // 2 + 1, requests).tolist()
        prompts = self.prompts(lengths)
        self.clear_steps()
        rate = sum(outputs) / self.engine.run(prompts, outputs, **(SAMPLED if sampled else {}))
        floor = sum(outputs) / self.shape.throughput_floor(lengths, outputs, min(requests, self.engine.rows))
        peers = self.peer_sampled if sampled else self.peer.get("throughput", {})
        target = None if sampled else self.targets.get("throughput", {}).get(name)
        kind = "sampled" if sampled else "greedy"
        self.report(f"{name}, {kind}", rate, "tokens/s", target=target, floor=floor, peer=peers.get(name))
        return rate


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("jaxserve", "vllm"), default="jaxserve")
    parser.add_argument("--model", default="llama-8b", help="a folder of benchmarks/models, or a path")
    parser.add_argument("--decode", default="", help="row counts: 1,8,64")
    parser.add_argument("--prefill", default="", help="rows x tokens: 1x512,16x2048")
    parser.add_argument(
        "--throughput", action="store_true", help="both offline workloads, greedy and sampled"
    )
    parser.add_argument("--all", action="store_true", help="the three workloads in all their sizes")
    parser.add_argument(
        "--peer-settings", action="store_true", help="1,024 rows and 16,384 tokens a step, as the peer had"
    )
    parser.add_argument(
        "--cache-plan", metavar="TOPOLOGY", help="compare the cache with what jaxserve plan says of this"
    )
    parser.add_argument(
        "--profile", default="", help="decoding rows, and prompts, profiled afterwards: 1,64,1x512,16x2048"
    )
    parser.add_argument("--top", type=int, default=14, help="kernels that a profile names")
    parser.add_argument("--limit", type=float, default=90, help="seconds of one case")
    parser.add_argument(
        "--start", choices=("empty", "warm"), help="what the compile cache is, to print the start's target"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each case; the last one's figure counts"
    )
    parser.add_argument(
        "--peer", type=Path, help="what --output wrote of another engine, instead of the table's figures"
    )
    parser.add_argument(
        "--steps", action="store_true", help="print where each case's time went, by kind of step"
    )
    parser.add_argument(
        "--xla-products", action="store_true", help="let XLA time its own large products beside cuBLAS'"
    )
    parser.add_argument(
        "--split-heads", type=int, help="most tokens for which one kernel norms, rotates and parts heads"
    )
    parser.add_argument(
        "--scale", type=int, default=1, help="divide all lengths and counts (to try it on a CPU)"
    )
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON of further LLM arguments")
    parser.add_argument("--output", help="write the results here as JSON")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs")
    options = parser.parse_args()
    if options.engine != "jaxserve":
        for name in ("steps", "profile", "cache_plan", "xla_products", "split_heads"):
            if getattr(options, name) != parser.get_default(name):
                parser.error(
                    f"--{name.replace('_', '-')} is about jaxserve's engine, and {options.engine} has another"
                )
    if options.repeats < 1:
        parser.error(f"--repeats is 1 or more, not {options.repeats}")
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s")
        logging.getLogger("jaxserve.runner.compilation").setLevel(logging.DEBUG)  # each program's time
    if options.xla_products:
        from jaxserve.runner import engine_programs

        engine_programs.LIBRARY_PRODUCTS = ()
    if options.split_heads is not None:
        from pallas_kernels.split_heads import gpu

        gpu.MOST_TOKENS = options.split_heads
    if options.all:
        options.decode, options.prefill = EVERYTHING["decode"], EVERYTHING["prefill"]
        options.throughput = True
    arguments = {**(PEER_SETTINGS if options.peer_settings else {}), **options.arguments}
    folder = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    config = json.loads((folder / "config.json").read_text())
    planned = None
    if options.cache_plan:
        import cache_size

        planned = cache_size.start_plan(folder, options.cache_plan, {"max_model_len": 16384, **arguments})
    engine = Engine(options.engine, folder, arguments, steps=options.steps)
    print(f"{options.engine}, {options.model}: ready after {engine.startup:.1f} s", flush=True)
    benchmark = Benchmark(engine, options.model, config, options.scale, options.peer)
    benchmark.start(options.start)
    if planned is not None:
        benchmark.cache(*cache_size.compare(engine.llm, planned))
    parts = Parts(limit=options.limit)
    parts.run("warm-up", lambda: engine.run(benchmark.prompts([64] * 4), [8] * 4))
    for name, function, *values in cases(benchmark, options):
        for _ in range(options.repeats):
            found = parts.run(name, function, *values)
        if name.startswith("profile") and found:
            benchmark.results.append({"case": name, "met": None, **found})
        if options.output:
            Path(options.output).write_text(json.dumps(benchmark.results, indent=1))
    benchmark.summary()
    return parts.end()


def cases(benchmark: Benchmark, options: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Names, functions and their arguments, in order."""
    for rows in filter(None, options.decode.split(",")):
        yield f"decode {rows}", benchmark.decode, int(rows)
    for case in filter(None, options.prefill.split(",")):
        rows, tokens = map(int, case.split("x"))
        yield f"prefill {case}", benchmark.prefill, rows, max(1, tokens // options.scale)
    for name in THROUGHPUT if options.throughput else ():
        yield name, benchmark.throughput, name
    for case in filter(None, options.profile.split(",")):
        import profile_step

        yield (
            f"profile {case}",
            profile_step.profile,
            benchmark.engine.llm,
            profile_step.scaled(case, options.scale),
            PROMPT // options.scale,
            options.top,
            benchmark.shape,
        )


if __name__ == "__main__":
    sys.exit(main())

"""Steady decode, prefill and offline throughput through the public LLM class, with dummy weights.

Prints each case's time, its floor (bytes over the memory bandwidth for decode, operations over the matrix rate for
prefill), the ratio to it, and the ratio to the peer's figure where one is known. ``--engine vllm`` runs the same cases
through an installed vLLM, so that both can be measured in one run.

    python benchmarks/offline.py --model llama-8b --decode 1,8,64 --prefill 1x2048 --throughput
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
}
"""vLLM 0.25.0 on one H200, 2026-11-29: ms a step, ms, output tokens a second."""


@dataclass(frozen=True)
class Shape:
    """What the floors follow from."""

    matrix_params: int
    head_params: int
    layers: int
    query_width: int
    kv_width: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        query = config["num_attention_heads"] * config["head_dim"]
        kv = config["num_key_value_heads"] * config["head_dim"]
        layer = hidden * (2 * query + 2 * kv) + 3 * hidden * config["intermediate_size"]
        return cls(layers * layer, hidden * config["vocab_size"], layers, query, kv)

    def decode_floor(self, rows: int, context: float) -> float:
        """Seconds: weights once, every row's keys and values once, in two bytes each."""
        cache = rows * context * 2 * self.kv_width * self.layers
        return 2 * (self.matrix_params + self.head_params + cache) / BANDWIDTH

    def prefill_floor(self, rows: int, tokens: int) -> float:
        """Seconds: all products, the causal half of attention, logits of the last token."""
        products = 2 * (self.matrix_params * rows * tokens + self.head_params * rows)
        attention = 2 * rows * tokens * tokens * self.query_width * self.layers
        return (products + attention) / MATRIX_RATE


class Engine:
    """jaxserve's LLM, or vLLM's, behind the few calls that the cases need."""

    def __init__(self, name: str, model: Path, arguments: dict[str, Any]) -> None:
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

    def __init__(self, engine: Engine, model: str, config: dict[str, Any], scale: int) -> None:
        self.engine, self.shape, self.scale = engine, Shape.of(config), scale
        self.vocab = config["vocab_size"]
        self.peer = PEER.get(model, {})
        self.rng = np.random.default_rng(0)
        self.results: list[dict[str, Any]] = []

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        return [self.rng.integers(8, self.vocab, n).tolist() for n in lengths]

    def report(self, case: str, value: float, unit: str, floor: float | None, peer: float | None) -> None:
        line = f"{case:34s} {value:10.2f} {unit:8s}"
        if floor is not None:
            line += f" floor {floor:8.2f}  x{value / floor:5.2f}"
        if peer is not None:
            line += f"  peer {peer:9.2f}  x{value / peer:5.2f}"
        print(line, flush=True)
        self.results.append({"case": case, "value": value, "unit": unit, "floor": floor, "peer": peer})

    def decode(self, rows: int) -> None:
        """(t(129 tokens) - t(1 token)) / 128."""
        length, output = PROMPT // self.scale, (OUTPUT - 1) // self.scale + 1
        times = []
        for max_tokens in (1, output):
            prompts = self.prompts([length] * rows)
            times.append(self.engine.run(prompts, [max_tokens] * rows))
        step = (times[1] - times[0]) / (output - 1)
        floor = self.shape.decode_floor(rows, length + output / 2)
        self.report(
            f"decode, {rows} rows", 1e3 * step, "ms", 1e3 * floor, self.peer.get("decode", {}).get(rows)
        )

    def prefill(self, rows: int, tokens: int) -> None:
        times = [self.engine.run(self.prompts([tokens] * rows), [1] * rows) for _ in range(5)]
        floor = 1e3 * self.shape.prefill_floor(rows, tokens)
        peer = self.peer.get("prefill", {}).get((rows, tokens))
        self.report(f"prefill, {rows} x {tokens}", 1e3 * statistics.median(times), "ms", floor, peer)

    def throughput(self, name: str, **params: Any) -> None:
        requests, prompt, output = (n // self.scale for n in THROUGHPUT[name])
        rng = np.random.default_rng(1)
        lengths = rng.integers(prompt // 2, prompt * 3 // 2 + 1, requests).tolist()
        outputs = rng.integers(output // 2, output * 3 // 2 + 1, requests).tolist()
        seconds = self.engine.run(self.prompts(lengths), outputs, **params)
        peer = self.peer.get("throughput", {}).get(name) if not params else None
        kind = "sampled" if params else "greedy"
        self.report(f"{name}, {kind}", sum(outputs) / seconds, "tokens/s", None, peer)


def main() -> None:
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
    parser.add_argument(
        "--scale", type=int, default=1, help="divide all lengths and counts (to try it on a CPU)"
    )
    parser.add_argument("--arguments", type=json.loads, default={}, help="JSON of further LLM arguments")
    parser.add_argument("--output", help="write the results here as JSON")
    parser.add_argument("--verbose", action="store_true", help="show what the engine logs")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8d ms %(message)s")
    folder = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    config = json.loads((folder / "config.json").read_text())
    engine = Engine(options.engine, folder, options.arguments)
    print(f"{options.engine}, {options.model}: ready after {engine.startup:.1f} s", flush=True)
    benchmark = Benchmark(engine, options.model, config, options.scale)
    benchmark.engine.run(benchmark.prompts([64] * 4), [8] * 4)
    for rows in filter(None, options.decode.split(",")):
        benchmark.decode(int(rows))
    for case in filter(None, options.prefill.split(",")):
        rows, tokens = map(int, case.split("x"))
        benchmark.prefill(rows, max(1, tokens // options.scale))
    if options.throughput:
        for name in THROUGHPUT:
            benchmark.throughput(name)
            benchmark.throughput(name, temperature=0.8, top_p=0.95, top_k=40)
    if options.output:
        Path(options.output).write_text(json.dumps(benchmark.results, indent=1))


if __name__ == "__main__":
    main()

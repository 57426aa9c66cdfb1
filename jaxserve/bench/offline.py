"""Offline benchmarks through the public LLM class: throughput of a workload, latency of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.bench.dataset import DatasetConfig, make_requests
from jaxserve.bench.endpoint import BenchRequest
from jaxserve.engine.llm import LLM
from jaxserve.engine.protocol import Prompt
from jaxserve.errors import ConfigError
from jaxserve.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)
LATENCY_VOCABULARY = 10_000
"""Ids of random prompts are below this, where the vocabulary allows it."""


def measure_throughput(
    llm: LLM, dataset: DatasetConfig, *, n: int = 1, detokenize: bool = True, progress: bool = True
) -> dict[str, Any]:
    """Give an LLM a whole workload at once.

    Args:
        llm: a ready one.
        dataset: the workload; outputs have their full length, whatever ends they hold.
        n: completions a prompt.
        detokenize: make text of the outputs.
        progress: show a bar.

    Returns:
        vLLM's keys, and ``output_tokens_per_second``.
    """
    requests = make_requests(dataset, llm.get_tokenizer(), chat=False)
    prompts: list[Prompt] = [request.prompt for request in requests]
    params = [_params(request, n, detokenize) for request in requests]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    seconds = time.perf_counter() - began
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (num_prompt + num_output) / seconds,
        "total_prompt_tokens": num_prompt,
        "total_output_tokens": num_output,
        "output_tokens_per_second": num_output / seconds,
    }


def _params(request: BenchRequest, n: int, detokenize: bool) -> SamplingParams:
    return SamplingParams(
        n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=request.output_len, detokenize=detokenize
    )


def measure_latency(
    llm: LLM,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_iters_warmup: int = 0,
    n: int = 1,
    detokenize: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Seconds that one batch takes from the first prompt's admission to the last output's end.

    Args:
        llm: a ready one.
        input_len, output_len: tokens of every prompt and output.
        batch_size: prompts.
        num_iters, num_iters_warmup: batches that count, and batches before them.
        n: completions a prompt.
        detokenize: make text of the outputs.
        seed: of the prompts.
        progress: show a bar.

    Returns:
        vLLM's keys: ``avg_latency``, ``std_latency``, ``latencies`` and ``percentiles``.
    """
    for name, value in (("input_len", input_len), ("output_len", output_len), ("batch_size", batch_size),
                        ("num_iters", num_iters)):  # fmt: skip
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.", param=name)
    tokenizer = llm.get_tokenizer()
    vocabulary = min(LATENCY_VOCABULARY, LATENCY_VOCABULARY if tokenizer is None else tokenizer.vocab_size)
    rng = np.random.default_rng(seed)
    params = SamplingParams(
        n=n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=output_len, detokenize=detokenize
    )

    def run_batch() -> float:
        # New prompts each time: the prefix cache, where it is on, must not answer.
        prompts: list[Prompt] = [*rng.integers(vocabulary, size=(batch_size, input_len)).tolist()]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    for _ in tqdm(range(num_iters_warmup), desc="Warming up", disable=not progress):
        run_batch()
    latencies = [run_batch() for _ in tqdm(range(num_iters), desc="Measuring", disable=not progress)]
    return time_statistics(latencies, "latency", "latencies")


def time_statistics(seconds: Sequence[float], name: str, plural: str) -> dict[str, Any]:
    """Mean, deviation and percentiles of times, under vLLM's keys for ``name``."""
    percentiles = np.percentile(seconds, PERCENTILES).tolist()
    return {
        f"avg_{name}": float(np.mean(seconds)),
        f"std_{name}": float(np.std(seconds)),
        plural: list(seconds),
        "percentiles": {str(percent): value for percent, value in zip(PERCENTILES, percentiles)},
    }


def print_latency(result: dict[str, Any], say: Callable[[str], object] = print) -> None:
    """A latency result for a terminal."""
    say(f"Avg latency: {result['avg_latency']:.4f} seconds")
    say(f"Std latency: {result['std_latency']:.4f} seconds")
    for percent, value in result["percentiles"].items():
        say(f"{percent}% percentile latency: {value:.4f} seconds")


def print_throughput(result: dict[str, Any], say: Callable[[str], object] = print) -> None:
    """A throughput result for a terminal."""
    say(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    say(f"Total num prompt tokens:  {result['total_prompt_tokens']}")
    say(f"Total num output tokens:  {result['total_output_tokens']}")

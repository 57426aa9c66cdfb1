"""What a run against a server came to: percentiles and rates under vLLM's names, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from jaxserve.bench.endpoint import RequestResult
from jaxserve.errors import ConfigError

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client queue", "Waiting for a Turn in the Client"),
}
"""A metric's name in flags and results, its short name and its title."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DETAILS = (
    "input_lens", "output_lens", "start_times", "ttfts", "itls", "latencies", "queue_times", "generated_texts",
    "errors",
)  # fmt: skip
"""Fields with an entry a request, kept with ``--save-detailed``."""
WIDTH = 50
MILLISECONDS = 1000.0


@dataclass(frozen=True)
class ReportConfig:
    """What is reported.

    Args:
        metrics: which of ``METRICS`` get percentiles.
        percentiles: which ones, in [0, 100].
        goodput: limits in milliseconds by metric; requests within all of them count.
    """

    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el")
    percentiles: Sequence[float] = (99.0,)
    goodput: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(
                    f"percentile_metrics names {name!r}; known are {', '.join(METRICS)}.",
                    param="percentile_metrics",
                )
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(
                    f"metric_percentiles must be in [0, 100], got {percentile}.", param="metric_percentiles"
                )
        for name, limit in self.goodput.items():
            if name not in GOODPUT_METRICS or not limit >= 0:
                raise ConfigError(
                    f"goodput got {name}:{limit:g}; it takes {', '.join(GOODPUT_METRICS)} with milliseconds, such as "
                    "ttft:200.",
                    param="goodput",
                )


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "tpot:50"]`` as a dict.

    Raises:
        ConfigError: naming the pair that is none.
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"goodput got {pair!r}; it takes pairs such as ttft:200 (milliseconds).", param="goodput"
            ) from None
    return limits


def time_per_output_token(result: RequestResult) -> float | None:
    """Mean seconds of an output token after the first; None for an output of one."""
    return (result.latency - result.ttft) / (result.output_tokens - 1) if result.output_tokens > 1 else None


def summarise(results: Sequence[RequestResult], seconds: float, config: ReportConfig) -> dict[str, Any]:
    """The run's figures, with vLLM's keys. Failed requests count in ``failed`` and in nothing else.

    Args:
        results: of all requests.
        seconds: how long they took together.
        config: what is reported.
    """
    good = [result for result in results if result.success]
    total_input, total_output = sum(r.prompt_len for r in good), sum(r.output_tokens for r in good)
    peak_tokens, peak_requests = _peaks(good)
    summary: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / seconds,
        "request_goodput": _num_within(good, config.goodput) / seconds if config.goodput else None,
        "output_throughput": total_output / seconds,
        "total_token_throughput": (total_input + total_output) / seconds,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "output_tokens_counted_by": "+".join(sorted({r.counted_by for r in good})),
    }
    for name, values in _values(good).items():
        if name in config.metrics:
            summary |= _statistics(name, values, config.percentiles)
    return summary | _details(results)


def _values(good: Sequence[RequestResult]) -> dict[str, list[float]]:
    return {
        "ttft": [r.ttft for r in good],
        "tpot": [tpot for r in good if (tpot := time_per_output_token(r)) is not None],
        "itl": [gap for r in good for gap in r.itl],
        "e2el": [r.latency for r in good],
        "client_queue_time": [r.queue_time for r in good],
    }


def _statistics(name: str, values: list[float], percentiles: Sequence[float]) -> dict[str, float]:
    array = np.array(values or [0.0]) * MILLISECONDS
    figures = {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
    }
    for percentile in percentiles:
        figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(array, percentile))
    return figures


def _details(results: Sequence[RequestResult]) -> dict[str, Any]:
    return {
        "input_lens": [r.prompt_len for r in results],
        "output_lens": [r.output_tokens if r.success else 0 for r in results],
        "start_times": [r.start_time for r in results],
        "ttfts": [r.ttft for r in results],
        "itls": [r.itl for r in results],
        "latencies": [r.latency for r in results],
        "queue_times": [r.queue_time for r in results],
        "generated_texts": [r.text for r in results],
        "errors": [r.error for r in results],
    }


def _num_within(good: Sequence[RequestResult], limits: dict[str, float]) -> int:
    """Requests that met every limit. An output of one token has no time per token, and meets that one."""
    count = 0
    for result in good:
        times = {"ttft": result.ttft, "tpot": time_per_output_token(result) or 0.0, "e2el": result.latency}
        count += all(times[name] * MILLISECONDS <= limit for name, limit in limits.items())
    return count


def _peaks(good: Sequence[RequestResult]) -> tuple[float, int]:
    """The most output tokens of a second (counted from the first request on), and the most requests open at once."""
    if not good:
        return 0.0, 0
    began = min(r.start_time for r in good)
    tokens: dict[int, float] = {}
    for result in good:
        # Chunks may hold several tokens: each gets its share.
        at, share = result.start_time - began + result.ttft, result.output_tokens / (1 + len(result.itl))
        for gap in (0.0, *result.itl):
            at += gap
            tokens[int(at)] = tokens.get(int(at), 0.0) + share
    changes = [(r.start_time, 1) for r in good] + [(r.start_time + r.latency, -1) for r in good]
    return max(tokens.values()), max(accumulate(change for _, change in sorted(changes)))


def print_table(summary: dict[str, Any], config: ReportConfig, say: Callable[[str], object] = print) -> None:
    """The figures for a terminal."""
    say(" Serving Benchmark Result ".center(WIDTH, "="))
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", summary["completed"]),
        ("Failed requests:", summary["failed"]),
        ("Benchmark duration (s):", summary["duration"]),
        ("Total input tokens:", summary["total_input_tokens"]),
        ("Total generated tokens:", summary["total_output_tokens"]),
        ("Request throughput (req/s):", summary["request_throughput"]),
        ("Output token throughput (tok/s):", summary["output_throughput"]),
        ("Peak output token throughput (tok/s):", summary["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", summary["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", summary["total_token_throughput"]),
    ]
    if config.goodput:
        rows.insert(6, ("Request goodput (req/s):", summary["request_goodput"]))
    for name, value in rows:
        say(_row(name, value))
    for metric in config.metrics:
        short, title = METRICS[metric]
        say(f" {title} ".center(WIDTH, "-"))
        for key in ("mean", "median"):
            say(_row(f"{key.capitalize()} {short} (ms):", summary[f"{key}_{metric}_ms"]))
        for percentile in config.percentiles:
            say(_row(f"P{percentile:g} {short} (ms):", summary[f"p{percentile:g}_{metric}_ms"]))
    say("=" * WIDTH)


def _row(name: str, value: float) -> str:
    return f"{name:<40} {value if isinstance(value, int) else format(value, '.2f'):<10}".rstrip()

"""A workload at several rates or concurrencies, and the files that keep such runs for drawing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, cast

from jaxserve.bench.report import DETAILS
from jaxserve.bench.serve import ServeBenchmark
from jaxserve.bench.traffic import Traffic
from jaxserve.errors import ConfigError


def sweep_traffic(
    rates: Sequence[float], concurrencies: Sequence[int], burstiness: float, max_concurrency: int | None
) -> list[Traffic]:
    """The loads of a sweep: each rate, then each concurrency at no rate.

    Raises:
        ConfigError: there is none, or one is no load.
    """
    loads = [Traffic(rate, burstiness, max_concurrency) for rate in rates]
    loads += [Traffic(inf, burstiness, limit) for limit in concurrencies]
    if not loads:
        raise ConfigError("A sweep needs --request-rates or --max-concurrencies.", param="request_rates")
    return loads


async def run_sweep(
    benchmark: ServeBenchmark,
    loads: Sequence[Traffic],
    keep: Callable[[list[dict[str, Any]]], object],
    say: Callable[[str], object] = print,
) -> None:
    """Run a benchmark under each load, one after another.

    Args:
        benchmark, loads: what is run.
        keep: gets the results so far after each load, without their per-request fields.
        say: where progress goes.
    """
    results: list[dict[str, Any]] = []
    async with benchmark:
        for load in loads:
            limit = "" if load.max_concurrency is None else f", {load.max_concurrency} in flight at most"
            say(f"\n{load.request_rate:g} requests/s{limit}")
            result = await benchmark.run(load)
            results.append({name: value for name, value in result.items() if name not in DETAILS})
            keep(results)


@dataclass(frozen=True)
class Curve:
    """One line of the drawings.

    Args:
        name: for the legend.
        results: of ``bench serve``, by rising load.
    """

    name: str
    results: list[dict[str, Any]]


def write_sweep(path: Path, name: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Keep a sweep's results under a name for the legend."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name, "results": list(results)}, indent=1) + "\n", encoding="utf-8")


def read_curve(path: Path) -> Curve:
    """The curve in a file: of a sweep, or of ``bench serve`` with one result a line.

    Raises:
        ConfigError: the file cannot be read, or holds no results.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        content = (
            json.loads(text)
            if not _has_lines(text)
            else [json.loads(line) for line in text.splitlines() if line]
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot {str(path)!r} cannot be read: {error}", param="plot") from None
    name = path.stem
    if isinstance(content, dict) and "results" in content:
        named = cast("dict[str, Any]", content)
        name, content = str(named.get("name") or name), named["results"]
    entries = cast("list[Any]", content if isinstance(content, list) else [content])
    found = [cast("dict[str, Any]", entry) for entry in entries if _is_result(entry)]
    if not found or len(found) != len(entries):
        raise ConfigError(f"plot {str(path)!r} holds no results of bench serve or bench sweep.", param="plot")
    return Curve(name, by_load(found))


def by_load(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results by rising rate, or by concurrency where all are sent at once: beyond saturation throughput does not rise.
    Where some have a rate and some have none, by throughput."""

    def rate(result: dict[str, Any]) -> float:
        return float(result.get("request_rate") or inf)

    def load(result: dict[str, Any]) -> tuple[float, ...]:
        return rate(result), float(result.get("max_concurrency") or inf), result["output_throughput"]

    mixed = len({rate(result) == inf for result in results}) > 1
    return sorted(results, key=(lambda result: (result["output_throughput"],)) if mixed else load)


def _has_lines(text: str) -> bool:
    """Whether a file holds one object a line rather than one in all."""
    first, _, rest = text.strip().partition("\n")
    return bool(rest) and first.startswith("{") and first.endswith("}")


def _is_result(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(
        cast("dict[str, Any]", entry).get("output_throughput"), (int, float)
    )

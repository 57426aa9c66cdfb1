"""Metrics as plain objects, for ``LLM.get_metrics``."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family


@dataclass(frozen=True)
class Metric:
    """One metric with one set of labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number of events since the engine's start. ``name`` is without ``_total``."""

    value: int = 0


@dataclass(frozen=True)
class Gauge(Metric):
    """A state now."""

    value: float = 0.0


@dataclass(frozen=True)
class Histogram(Metric):
    """Observed values. ``buckets`` maps upper bounds, ``+Inf`` the last, to how many values were at most that."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict[str, int])


def snapshot(registry: CollectorRegistry) -> list[Metric]:
    """The values of all metrics in ``registry``."""
    return [metric for family in registry.collect() for metric in _metrics_of(family)]


def _metrics_of(family: Family) -> list[Metric]:
    if family.type == "histogram":
        return _histograms(family)
    if family.type == "counter":
        totals = (sample for sample in family.samples if sample.name.endswith("_total"))
        return [Counter(family.name, dict(sample.labels), int(sample.value)) for sample in totals]
    return [Gauge(family.name, dict(sample.labels), sample.value) for sample in family.samples]


def _histograms(family: Family) -> list[Metric]:
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    buckets: dict[tuple[tuple[str, str], ...], dict[str, int]] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        if "le" in sample.labels:
            buckets.setdefault(key, {})[sample.labels["le"]] = int(sample.value)
        else:
            found.setdefault(key, {})[sample.name.rsplit("_", 1)[1]] = sample.value
    return [
        Histogram(family.name, dict(key), int(values["count"]), values["sum"], buckets.get(key, {}))
        for key, values in found.items()
        if "count" in values
    ]

"""The dashboard and the alerts as files: current, and naming only metrics that a server has."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import yaml

from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.metrics.http_metrics import HTTPMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
NAME = re.compile(r"\b(jaxserve:[a-z0-9_]+|http_[a-z_]+)\b")
PARTS = re.compile(r"_(bucket|sum|count)$")


def metric_names() -> set[str]:
    """Of histograms the bare name, of counters the one with ``_total``."""
    metrics = EngineMetrics("m", 1024)
    metrics.record_cache_config(block_size=1, num_gpu_blocks=1)
    HTTPMetrics(metrics.registry)
    return {family.name + "_total" * (family.type == "counter") for family in metrics.registry.collect()}


def dashboard_expressions() -> list[str]:
    content = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in content["panels"] for target in panel.get("targets", ())]


def named(text: str) -> set[str]:
    return {PARTS.sub("", name) for name in NAME.findall(text)}


def test_the_dashboard_is_current():
    spec = importlib.util.spec_from_file_location("write_dashboard", ROOT / "scripts" / "write_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    assert written == module.dashboard(), "run python scripts/write_dashboard.py"


def test_the_dashboard_shows_every_metric_and_no_other():
    shown = named(" ".join(dashboard_expressions()))
    assert shown == metric_names()


def test_alerts_name_metrics_that_exist():
    content = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    rules = [rule for group in content["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) == 9
    for rule in rules:
        assert named(rule["expr"]) <= metric_names(), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")

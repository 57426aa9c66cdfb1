"""Write deploy/observability/grafana-dashboard.json, a dashboard for every metric of a server.

python scripts/write_dashboard.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "deploy" / "observability" / "grafana-dashboard.json"

ENGINE = 'model_name=~"$model_name",instance=~"$instance"'
HTTP = 'instance=~"$instance"'
WINDOW = "[$__rate_interval]"
Query = tuple[str, str]
"""An expression and its legend."""


def metric(name: str, labels: str = ENGINE) -> str:
    return f"jaxserve:{name}{{{labels}}}"


def rate(name: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric(name)}{WINDOW}))"


def ratio(part: str, whole: str) -> str:
    """0 while there is nothing to divide by."""
    return f"({part}) / ({whole} > 0) or vector(0)"


def quantiles(name: str, *shares: float) -> list[Query]:
    return [
        (f"histogram_quantile({share}, {rate(name + '_bucket', 'le')})", f"p{share * 100:g}")
        for share in shares or (0.5, 0.9, 0.99)
    ]


def mean(name: str, legend: str = "mean") -> Query:
    return ratio(rate(name + "_sum"), rate(name + "_count")), legend


HTTP_BUCKETS = f"rate(http_request_duration_seconds_bucket{{{HTTP}}}{WINDOW})"
COMPUTED, PADDING = rate("iteration_tokens_total_sum"), rate("padding_tokens_total")
ROWS: list[tuple[str, list[tuple[str, str, list[Query]]]]] = [
    ("Load", [
        ("Requests", "short", [
            (f"sum ({metric('num_requests_running')})", "running"),
            (f"sum by (reason) ({metric('num_requests_waiting_by_reason')})", "waiting: {{reason}}"),
            (f"sum ({metric('num_requests_waiting')})", "waiting"),
        ]),
        ("Tokens a second", "short", [
            (rate("generation_tokens_total"), "generated"),
            (rate("prompt_tokens_by_source_total", "source"), "prompt: {{source}}"),
        ]),
        ("Requests finished a second", "reqps", [
            (rate("request_success_total", "finished_reason"), "{{finished_reason}}"),
        ]),
        ("Requests refused a second", "reqps", [
            (rate("admission_rejections_total", "reason") + " or vector(0)", "{{reason}}"),
        ]),
    ]),
    ("Latency", [
        ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        ("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
        ("Time per output token, a request's mean", "s", quantiles("request_time_per_output_token_seconds")),
        ("End to end", "s", quantiles("e2e_request_latency_seconds")),
        ("Where the time goes (means)", "s", [
            mean("request_queue_time_seconds", "waiting"),
            mean("request_prefill_time_seconds", "prefill"),
            mean("request_decode_time_seconds", "decode"),
            mean("request_inference_time_seconds", "prefill and decode"),
        ]),
        ("Waiting", "s", quantiles("request_queue_time_seconds")),
    ]),
    ("KV cache", [
        ("Blocks in use", "percentunit", [(f"max by (instance) ({metric('kv_cache_usage_perc')})", "{{instance}}")]),
        ("Prefix cache: share of prompt tokens found", "percentunit", [
            (ratio(rate("prefix_cache_hits_total"), rate("prefix_cache_queries_total")), "of those looked up"),
            (ratio(rate("prompt_tokens_cached_total"), rate("prompt_tokens_total")), "of all"),
        ]),
        ("Preemptions a second", "short", [
            (rate("num_preemptions_total"), "preemptions"),
            mean("request_num_preemptions", "of a request, mean"),
        ]),
        ("Size", "short", [(f"max by (block_size, num_gpu_blocks) ({metric('cache_config_info')})",
                            "{{num_gpu_blocks}} blocks of {{block_size}} tokens")]),
    ]),
    ("Steps", [
        ("Device time of a step", "s", quantiles("step_device_seconds")),
        ("Host time of a step", "s", quantiles("step_host_seconds")),
        ("Tokens of a step", "short", [
            mean("iteration_tokens_total"),
            *quantiles("iteration_tokens_total", 0.5, 0.99),
        ]),
        ("Steps a second, by shape", "short", [(rate("steps_total", "num_tokens"), "{{num_tokens}} tokens")]),
        ("Share of padding", "percentunit", [(ratio(PADDING, f"{PADDING} + {COMPUTED}"), "padding")]),
        ("Experts: the most loaded one's tokens over the mean", "short", [mean("moe_expert_imbalance")]),
        ("Compilations while serving (should be none)", "short", [
            (f"sum by (instance) ({metric('compilations_total')})", "{{instance}}"),
        ]),
    ]),
    ("What is asked for", [
        ("Prompt tokens", "short", quantiles("request_prompt_tokens", 0.5, 0.95)),
        ("Prompt tokens computed, without those cached", "short",
         quantiles("request_prefill_kv_computed_tokens", 0.5, 0.95)),
        ("Output tokens", "short", [
            *quantiles("request_generation_tokens", 0.5, 0.95),
            mean("request_max_num_generation_tokens", "longest choice, mean"),
        ]),
        ("Parameters (means)", "short", [
            mean("request_params_max_tokens", "max_tokens"),
            mean("request_params_n", "n"),
        ]),
    ]),
    ("HTTP", [
        ("Requests a second", "reqps", [
            (f"sum by (handler, status) (rate(http_requests_total{{{HTTP}}}{WINDOW}))", "{{handler}} {{status}}"),
        ]),
        ("Duration, p95", "s", [
            (f"histogram_quantile(0.95, sum by (le, handler) ({HTTP_BUCKETS}))", "{{handler}}"),
        ]),
    ]),
]  # fmt: skip


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query, "refresh": 2, "includeAll": True, "allValue": ".*", "multi": True,
        "current": {"text": "All", "value": "$__all"}, "sort": 1,
    }  # fmt: skip


DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(
    number: int, title: str, unit: str, queries: list[Query], x: int, y: int, width: int
) -> dict[str, Any]:
    return {
        "id": number, "type": "timeseries", "title": title, "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": 8},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(queries)
        ],
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        y += 1
        columns = 3 if len(row) % 3 == 0 else 2
        width = 24 // columns
        for index, (name, unit, queries) in enumerate(row):
            place = (index % columns * width, y + index // columns * 8)
            panels.append(panel(len(panels) + 1, name, unit, queries, *place, width))
        y += -(-len(row) // columns) * 8
    return {
        "uid": "jaxserve", "title": "jaxserve", "tags": ["jaxserve", "llm"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "", "panels": panels,
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
                 "current": {}},
                variable("model_name", "Model", "label_values(jaxserve:num_requests_running, model_name)"),
                variable("instance", "Instance", "label_values(jaxserve:num_requests_running, instance)"),
            ]
        },
    }  # fmt: skip


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")

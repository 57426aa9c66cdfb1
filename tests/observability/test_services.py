"""A server watched by real services: an OpenTelemetry collector (rotel) takes its traces, Prometheus its metrics; every
query of the dashboard finds data after a short load, and the alerts do what they say. The tests start the services, and
skip themselves only where their programs are missing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from server_process import ServerProcess, free_port, server_process
from tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "observability"
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
SECONDS = 90.0


def missing_program(name: str) -> bool:
    return shutil.which(name) is None


needs_prometheus = pytest.mark.skipif(
    missing_program("prometheus") or missing_program("promtool"), reason="needs Debian's prometheus"
)
needs_collector = pytest.mark.skipif(find_spec("rotel") is None, reason="needs pip install rotel")


def until(found: Callable[[], Any], what: str) -> Any:
    """Wait for something true."""
    end = time.monotonic() + SECONDS
    while not (result := found()):
        assert time.monotonic() < end, f"{what} does not come"
        time.sleep(0.1)
    return result


class Process:
    """A service, and what it has printed."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent)

    def text(self) -> str:
        assert self._process.poll() is None, self._log.read_text()
        return re.sub(r"\x1b\[[0-9;]*m", "", self._log.read_text())

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("services")


class Collector:
    """rotel, printing the spans that it receives over gRPC and HTTP."""

    def __init__(self, folder: Path) -> None:
        spec = find_spec("rotel")
        assert spec is not None
        assert spec.origin is not None
        self.grpc, self.http = free_port(), free_port()
        self.process = Process(
            [
                str(Path(spec.origin).parent / "rotel-agent"), "start",
                "--otlp-grpc-endpoint", f"127.0.0.1:{self.grpc}", "--otlp-http-endpoint", f"127.0.0.1:{self.http}",
                "--exporter", "blackhole", "--debug-log", "traces", "--debug-log-verbosity", "detailed",
            ],
            folder / "collector.log",
        )  # fmt: skip
        until(lambda: "Starting Rotel" in self.process.text(), "the collector")

    def spans(self) -> list[dict[str, str]]:
        """What the collector has received: fields and attributes by name."""
        spans: list[dict[str, str]] = []
        service = ""
        for line in self.process.text().splitlines():
            if match := re.match(r"\s+-> ([\w.]+): \w+\((.*)\)$", line):
                if match[1] == "service.name":
                    service = match[2]
                elif spans:
                    spans[-1][match[1]] = match[2]
            elif line.startswith("Span #"):
                spans.append({"service.name": service})
            elif spans and (match := re.match(r"\s*(Trace ID|Parent ID|ID|Name|Kind)\s*: (.*)$", line)):
                spans[-1][match[1]] = match[2].strip()
            elif spans and (match := re.match(r"(Start time|End time): (\d+)", line)):
                spans[-1][match[1]] = match[2]
        return spans

    def trace(self, request: str, num_spans: int) -> dict[str, dict[str, str]]:
        """The spans of a request's trace, by name, when so many have come."""

        def find() -> dict[str, dict[str, str]] | None:
            spans = self.spans()
            ids = [span["Trace ID"] for span in spans if request in span.get("gen_ai.request.id", "")]
            found = {span["Name"]: span for span in spans if span["Trace ID"] in ids}
            return found if len(found) >= num_spans else None

        return until(find, f"the trace of {request}")


@pytest.fixture(scope="module")
def collector(folder: Path) -> Iterator[Collector]:
    collector = Collector(folder)
    yield collector
    collector.process.stop()


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_checkpoint(folder / "llama")


@contextlib.contextmanager
def serving(model: Path, endpoint: str | None, **engine: Any) -> Iterator[ServerProcess]:
    options = {
        "engine": {
            "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 512, "log_level": "info",
            "log_format": "json", "otlp_traces_endpoint": endpoint, **engine,
        },
        "runner": {"num_blocks": 200, "step_seconds": 0.01, "max_model_len": 512},
    }  # fmt: skip
    with server_process(model, **options) as server:
        yield server


def complete(server: ServerProcess, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": "abc " * 20, "max_tokens": 8, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


# --- traces and logs ------------------------------------------------------------------------------------------


@needs_collector
def test_the_collector_receives_traces_and_logs_are_json(collector, model, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    with serving(model, f"http://127.0.0.1:{collector.grpc}") as server:
        answer = complete(server, {**TRACED, "x-request-id": "first"}, n=2, temperature=0.5)
        assert answer.status_code == 200
        spans = collector.trace("first", 5)
        refused = complete(server, {"x-request-id": "refused"}, temperature=-1)
        assert refused.status_code == 400
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", timeout=60, headers={"x-request-id": "left"},
            json={"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True},
        ) as response:  # fmt: skip
            next(response.iter_lines())
        left = collector.trace("left", 5)
        _, log = server.stop()

    whole = spans["llm_request"]
    assert (whole["Trace ID"], whole["Parent ID"]) == (TRACE_ID, SPAN_ID)
    assert (whole["service.name"], whole["Kind"]) == ("jaxserve", "SPAN_KIND_SERVER")
    assert whole["gen_ai.response.model"] == "fake"
    assert (whole["gen_ai.request.n"], whole["gen_ai.usage.num_sequences"]) == ("2", "2")
    assert whole["gen_ai.usage.completion_tokens"] == "16"
    assert float(whole["gen_ai.latency.e2e"]) >= float(whole["gen_ai.latency.time_to_first_token"]) > 0
    assert set(spans) == {"llm_request", "queue", "prefill", "decode", "detokenize"}
    assert all(span["Parent ID"] == whole["ID"] for name, span in spans.items() if name != "llm_request")
    order = [
        int(spans[name][end]) for name in ("queue", "prefill", "decode") for end in ("Start time", "End time")
    ]
    assert order == sorted(order)
    assert int(whole["Start time"]) == order[0]
    assert abs(int(whole["End time"]) / 1e9 - time.time()) < 300
    assert left["llm_request"]["Parent ID"] == ""
    assert left["llm_request"]["Trace ID"] != TRACE_ID
    assert "abort" in left["llm_request"]["gen_ai.response.finish_reasons"]
    assert not [span for span in collector.spans() if "refused" in span.get("gen_ai.request.id", "")]

    lines = [json.loads(line) for line in log.splitlines()]
    assert {line["room"] for line in lines} >= {"server"}
    access = {line["request_id"]: line for line in lines if "request_id" in line}
    assert (access["first"]["status"], access["refused"]["status"]) == (200, 400)
    assert (access["first"]["method"], access["first"]["path"]) == ("POST", "/v1/completions")
    assert access["first"]["traceparent"] == TRACED["traceparent"]
    assert all(line["level"] in ("info", "warning", "error") for line in lines)
    assert "abc abc" not in log


@needs_collector
def test_traces_over_http(collector, model, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-model")
    with serving(model, f"http://127.0.0.1:{collector.http}") as server:
        assert complete(server, {"x-request-id": "over-http"}).status_code == 200
        server.stop()  # sends what is left
        assert collector.trace("over-http", 5)["llm_request"]["service.name"] == "my-model"


# --- metrics --------------------------------------------------------------------------------------------------


class Prometheus:
    """Prometheus, scraping a server twice a second, with the alerts that are shipped."""

    def __init__(self, folder: Path, target: str) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {
            "scrape_interval": "500ms",
            "scrape_timeout": "500ms",
            "evaluation_interval": "500ms",
        }
        config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        self.process = Process(
            [
                "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            folder / "prometheus.log",
        )  # fmt: skip
        until(self._is_ready, "Prometheus")

    def _is_ready(self) -> bool:
        self.process.text()
        with contextlib.suppress(httpx.TransportError):
            return self._http.get("/-/ready").status_code == 200
        return False

    def get(self, path: str, **params: str) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """The numbers that an expression has now."""
        result = self.get("query", query=expression)["result"]
        numbers = [float(entry["value"][1]) for entry in result]
        return [number for number in numbers if not isnan(number)]


@needs_prometheus
def test_prometheus_scrapes_and_the_dashboard_has_data(folder, model):
    content = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    queries = [(panel["title"], t["expr"]) for panel in content["panels"] for t in panel.get("targets", ())]
    assert len(queries) > 30
    with serving(model, None, max_num_queued_reqs=1, max_num_seqs=2) as server:
        prometheus = Prometheus(folder, f"127.0.0.1:{server.port}")
        try:
            until(lambda: prometheus.values('up{job="jaxserve"}') == [1.0], "the first scrape")
            put_load_on(server)

            def without_data() -> list[tuple[str, str]]:
                return [(title, expr) for title, expr in queries if not prometheus.values(filled(expr))]

            end = time.monotonic() + SECONDS
            while empty := without_data():
                assert time.monotonic() < end, f"no data: {empty}"
                put_load_on(server)
            # 'or vector(0)' gives a number to anything: so every metric that is named must be there itself.
            names = {name for _, expr in queries for name in re.findall(r"(jaxserve:\w+|http_\w+)\{", expr)}
            known = set(prometheus.get("label/__name__/values"))
            assert names <= known, names - known
            generated = "sum(jaxserve:generation_tokens_total)"
            until(lambda: prometheus.values(generated)[0] >= 64, "the last scrape")
            rules = prometheus.get("rules")["groups"][0]["rules"]
            assert {rule["health"] for rule in rules} == {"ok"}
        finally:
            prometheus.process.stop()


def put_load_on(server: ServerProcess) -> None:
    """Requests that touch every metric: cached prompts, several choices, a full queue, a mistake."""
    body = {"prompt": ["abc " * 20] * 12, "max_tokens": 8, "ignore_eos": True, "n": 2}
    for _ in range(4):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)  # too many at once: refused
        assert complete(server, n=2).status_code == 200
        assert complete(server, temperature=-1).status_code == 400
        time.sleep(0.3)


def filled(expression: str) -> str:
    """A dashboard's expression as Grafana sends it."""
    filled = (
        expression.replace("$__rate_interval", "30s").replace("$model_name", ".*").replace("$instance", ".*")
    )
    assert "$" not in filled
    return filled


@needs_prometheus
def test_promtool_accepts_the_rules_and_they_fire_when_they_should():
    for command in (
        ["check", "config", "deploy/observability/prometheus.yml"],
        ["check", "rules", "deploy/observability/alerts.yml"],
        ["test", "rules", "tests/observability/alerts_test.yml"],
    ):
        done = subprocess.run(
            ["promtool", *command], cwd=ROOT, capture_output=True, text=True, env=os.environ
        )
        assert done.returncode == 0, done.stdout + done.stderr

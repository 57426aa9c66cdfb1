"""Traces of requests: spans, attributes, the client's context; what keeps tracing off is said at the start."""

from __future__ import annotations

import sys
import time

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxserve.errors import ConfigError
from jaxserve.metrics import traces
from jaxserve.metrics.traces import RequestTracer, TracedRequest, check_tracing, trace_headers
from jaxserve.outputs import RequestMetrics
from jaxserve.sampling_params import SamplingParams

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


def request(times: RequestMetrics, ended: float, reasons=("stop",), parent=None) -> TracedRequest:
    return TracedRequest(
        "r-1", "m", SamplingParams(max_tokens=9, top_p=0.5), parent, times, ended, reasons, 10, 4, 3
    )


@pytest.fixture
def spans(monkeypatch):
    """Traces requests; their spans by name."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(traces, "check_tracing", lambda endpoint: lambda: exporter)
    monkeypatch.setattr(exporter, "shutdown", lambda: None)  # or it would forget them

    def trace(*requests: TracedRequest):
        tracer = RequestTracer("http://collector")
        for one in requests:
            tracer.record(one)
        tracer.close()
        return {span.name: span for span in exporter.get_finished_spans()}

    return trace


def test_a_request_is_a_span_with_its_parts(spans):
    now = time.monotonic()
    times = RequestMetrics(now - 4, now - 3, now - 2, now - 1, 3, 1, 0.25)
    found = spans(request(times, now, parent=PARENT))
    assert set(found) == {"llm_request", "queue", "prefill", "decode", "detokenize"}
    whole = found["llm_request"]
    assert whole.kind is SpanKind.SERVER
    assert f"{whole.context.trace_id:032x}" == TRACE_ID
    assert f"{whole.parent.span_id:016x}" == SPAN_ID
    assert whole.resource.attributes["service.name"] == "jaxserve"
    assert {span.parent.span_id for span in found.values() if span is not whole} == {whole.context.span_id}
    for name in ("queue", "prefill", "decode", "detokenize"):
        assert (found[name].end_time - found[name].start_time) / 1e9 == pytest.approx(1, abs=1e-5)
    assert whole.end_time / 1e9 == pytest.approx(time.time(), abs=30)
    assert [found[name].start_time for name in ("prefill", "decode", "detokenize")] == [
        found[name].end_time for name in ("queue", "prefill", "decode")
    ]
    expected = {
        "gen_ai.request.id": "r-1", "gen_ai.response.model": "m", "gen_ai.request.n": 1, "gen_ai.request.max_tokens": 9,
        "gen_ai.request.top_p": 0.5, "gen_ai.usage.prompt_tokens": 10, "gen_ai.usage.completion_tokens": 3,
        "gen_ai.usage.num_sequences": 1, "jaxserve.usage.cached_tokens": 4, "jaxserve.num_preemptions": 1,
        "gen_ai.latency.time_in_queue": pytest.approx(1), "gen_ai.latency.time_to_first_token": pytest.approx(2),
        "gen_ai.latency.e2e": pytest.approx(4), "gen_ai.latency.time_in_model_prefill": pytest.approx(1),
        "gen_ai.latency.time_in_model_decode": pytest.approx(1), "jaxserve.latency.time_in_detokenize": 0.25,
        "gen_ai.latency.time_in_model_inference": pytest.approx(2),
    }  # fmt: skip
    assert {name: whole.attributes[name] for name in expected} == expected


def test_a_request_that_never_ran_waited_only(spans):
    now = time.monotonic()
    found = spans(request(RequestMetrics(now - 1), now, ["error"]))
    assert set(found) == {"llm_request", "queue"}
    assert found["llm_request"].status.status_code is StatusCode.ERROR
    assert found["llm_request"].parent is None


def test_a_client_that_does_not_sample_is_respected(spans):
    parent = {"traceparent": PARENT["traceparent"][:-2] + "00"}
    now = time.monotonic()
    assert spans(request(RequestMetrics(now - 1), now, parent=parent)) == {}


def test_a_broken_context_begins_a_trace(spans):
    now = time.monotonic()
    found = spans(request(RequestMetrics(now - 1), now, parent={"traceparent": "00-nonsense"}))
    assert found["llm_request"].parent is None


def test_a_clients_headers_are_taken_as_far_as_they_are_sound():
    state = {"tracestate": "a=b,c@d=e"}
    assert trace_headers({**PARENT, **state, "host": "x"}) == {**PARENT, **state}
    later = {"traceparent": PARENT["traceparent"].replace("00", "01", 1) + "-more"}
    assert trace_headers(later) == later
    for broken in ("", "a" * 513, "a=\x9b1m", "a=\u00e9"):
        assert trace_headers({**PARENT, "tracestate": broken}) == PARENT
    for broken in ("", "x" * 60_000, PARENT["traceparent"].upper(), PARENT["traceparent"] + "\x9b"):
        assert trace_headers({"traceparent": broken, **state}) is None
    assert trace_headers(state) is None


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="must be one of grpc, http/protobuf"):
        check_tracing("http://x")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"jaxserve\[otel\]"):
        check_tracing("http://x")
    check_tracing(None)

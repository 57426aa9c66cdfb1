"""OpenTelemetry traces of requests: one span a request, with its parts as children, sent to a collector (OTLP).

Span and attributes have vLLM's names. Requests are traced when they end, from the times that the engine keeps anyway:
nothing is done per token. opentelemetry is imported when tracing is on; it is the ``otel`` extra.
"""

from __future__ import annotations

import contextvars
import importlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jaxserve.errors import ConfigError
from jaxserve.outputs import RequestMetrics
from jaxserve.sampling_params import SamplingParams
from jaxserve.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

SPAN_NAME = "llm_request"
SCOPE_NAME = "jaxserve.engine"
SERVICE_NAME = "jaxserve"
"""Unless OTEL_SERVICE_NAME says otherwise."""
TRACE_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context: by these a client's trace goes on here."""
_CONTEXT = (
    re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,100})?"),
    re.compile(r"[\x20-\x7e]{1,512}"),
)
"""What they look like. Anything else is not let into logs or spans."""
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
HTTP_PATH = "/v1/traces"
CLOSE_SECONDS = 3.0

client_trace: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "client_trace", default=None
)
"""The trace headers of the HTTP request that is being answered."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that has ended. Times are of ``time.monotonic()``.

    Args:
        request_id, model, params: whose and what.
        parent: the client's trace headers; None begins a trace.
        times: of its parts.
        ended: when its last text was ready.
        finish_reasons: of its completions.
        num_prompt_tokens, num_cached_tokens, num_generation_tokens: its lengths.
    """

    request_id: str
    model: str
    params: SamplingParams
    parent: Mapping[str, str] | None
    times: RequestMetrics
    ended: float
    finish_reasons: Sequence[str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int


def trace_headers(headers: Mapping[str, str]) -> dict[str, str] | None:
    """The trace that a client is in, of its request's headers; None without one. A broken one is none."""
    parent, state = (
        value if value is not None and form.fullmatch(value) else None
        for value, form in zip(map(headers.get, TRACE_HEADERS), _CONTEXT)
    )
    if parent is None:
        return None  # without it the state means nothing
    return {name: value for name, value in zip(TRACE_HEADERS, (parent, state)) if value is not None}


class RequestTracer:
    """Sends spans in the background. Calls come from one thread.

    Args:
        endpoint: the collector. gRPC unless OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says ``http/protobuf``.

    Raises:
        ConfigError: opentelemetry is not installed, or the protocol is not known.
    """

    def __init__(self, endpoint: str) -> None:
        exporter = check_tracing(endpoint)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.version": __version__})
        if not os.environ.get("OTEL_SERVICE_NAME"):
            resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter()))
        self._tracer = self._provider.get_tracer(SCOPE_NAME, __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, request: TracedRequest) -> None:
        """Trace a request that has ended."""
        from opentelemetry import trace

        # Spans have the wall clock's time; taken each time, since that one may be set.
        offset = time.time_ns() - time.monotonic_ns()

        def wall(seconds: float) -> int:
            return int(seconds * 1e9) + offset

        parent: Context = self._propagator.extract(request.parent or {})
        span = self._tracer.start_span(
            SPAN_NAME,
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=wall(request.times.arrival_time),
        )
        if "error" in request.finish_reasons:
            span.set_status(trace.StatusCode.ERROR, "The request failed in the engine.")
        if span.is_recording():
            self._add_parts(span, request, wall)
        span.end(wall(request.ended))

    def _add_parts(self, span: Span, request: TracedRequest, wall: Callable[[float], int]) -> None:
        from opentelemetry import trace

        inside = trace.set_span_in_context(span)
        for name, start, end, attributes in _parts(request):
            part = self._tracer.start_span(
                name, context=inside, attributes=attributes, start_time=wall(start)
            )
            part.end(wall(max(start, end)))

    def close(self) -> None:
        """Send what is left; a collector that does not answer is not waited for longer than CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning("The last traces were not sent: the collector does not answer.")


def open_tracer(endpoint: str | None) -> RequestTracer | None:
    """A tracer for ``endpoint``; None without one."""
    return None if endpoint is None else RequestTracer(endpoint)


def check_tracing(endpoint: str | None) -> Callable[[], Any]:
    """Find out whether tracing to ``endpoint`` is possible, before anything is loaded; what makes its exporter.

    Raises:
        ConfigError: opentelemetry is not installed, or the protocol is not known.
    """
    name = next(filter(None, map(os.environ.get, PROTOCOL_VARIABLES)), "grpc")
    if endpoint is None:
        return lambda: None
    if name not in EXPORTERS:
        raise ConfigError(
            f"{PROTOCOL_VARIABLES[0]} is {name!r}; it must be one of {', '.join(EXPORTERS)}.",
            param="otlp_traces_endpoint",
        )
    if name != "grpc":
        parts = urlsplit(endpoint)
        endpoint = endpoint if parts.path not in ("", "/") else endpoint.rstrip("/") + HTTP_PATH
    try:
        importlib.import_module("opentelemetry.sdk.trace")
        exporter: Any = importlib.import_module(EXPORTERS[name])
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry: pip install 'jaxserve[otel]' ({error}).",
            param="otlp_traces_endpoint",
        ) from None
    return lambda: exporter.OTLPSpanExporter(endpoint=endpoint)


def _attributes(request: TracedRequest) -> dict[str, Any]:
    """What the request was and how long its parts took, in seconds; what is not known is left out."""
    params, times = request.params, request.times
    arrived, scheduled = times.arrival_time, times.first_scheduled_time
    first, last = times.first_token_time, times.last_token_time
    values: dict[str, Any] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.model": request.model,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.response.finish_reasons": list(request.finish_reasons),
        "gen_ai.usage.num_sequences": len(request.finish_reasons),
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": request.num_generation_tokens,
        "jaxserve.usage.cached_tokens": request.num_cached_tokens,
        "jaxserve.num_preemptions": times.num_preemptions,
        "gen_ai.latency.e2e": request.ended - arrived,
    }
    if scheduled is not None:
        values["gen_ai.latency.time_in_queue"] = scheduled - arrived
    if first is not None and last is not None:
        values["gen_ai.latency.time_to_first_token"] = first - arrived
        values["gen_ai.latency.time_in_model_decode"] = last - first
        values["jaxserve.latency.time_in_detokenize"] = times.detokenize_seconds
        if scheduled is not None:
            values["gen_ai.latency.time_in_model_prefill"] = first - scheduled
            values["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return {name: value for name, value in values.items() if value is not None}


def _parts(request: TracedRequest) -> list[tuple[str, float, float, dict[str, Any]]]:
    """The request's parts as far as it came: name, start, end, attributes."""
    times = request.times
    scheduled, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
    if scheduled is None:
        return [("queue", times.arrival_time, request.ended, {})]
    parts: list[tuple[str, float, float, dict[str, Any]]] = [("queue", times.arrival_time, scheduled, {})]
    if first is None or last is None:
        return [*parts, ("prefill", scheduled, request.ended, {})]
    computed = request.num_prompt_tokens - request.num_cached_tokens
    parts.append(("prefill", scheduled, first, {"jaxserve.computed_tokens": computed}))
    parts.append(("decode", first, last, {"gen_ai.usage.completion_tokens": request.num_generation_tokens}))
    # From the last step's end to the last text: the way to this process, and what was left to detokenize.
    parts.append(("detokenize", last, request.ended, {"jaxserve.total_seconds": times.detokenize_seconds}))
    return parts

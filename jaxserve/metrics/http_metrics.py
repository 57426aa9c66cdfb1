"""HTTPMetrics: requests and their times by route, under the names that dashboards for FastAPI expect."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from jaxserve.metrics.buckets import HTTP_SECONDS


class HTTPMetrics:
    """HTTP requests in ``registry``. ``handler`` is the route's template, so that labels stay few."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "HTTP requests.", ["handler", "method", "status"], registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From the request's head to the response's end.",
            ["handler", "method"],
            registry=registry,
            buckets=HTTP_SECONDS,
        )

    def record(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a finished request. ``status`` is exposed as its class, such as 2xx."""
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        self._seconds.labels(handler, method).observe(seconds)

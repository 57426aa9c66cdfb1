"""What operators ask a server: /health, /ping, /version, /metrics."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from jaxserve.errors import EngineDeadError
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.server.errors import error_response
from jaxserve.server.generation import GenerationService
from jaxserve.server.openai.responses import json_response
from jaxserve.version import __version__


def operation_routes(service: GenerationService, metrics: EngineMetrics) -> APIRouter:
    router = APIRouter()

    async def health() -> Response:
        """200 while the engine lives, 503 after it died."""
        reason = service.engine.errored
        if reason is None:
            return Response()
        return error_response(EngineDeadError(f"The engine has stopped: {reason}"))

    async def version() -> Response:
        return json_response({"version": __version__})

    async def prometheus() -> Response:
        """Prometheus' text format."""
        text, content_type = metrics.render()
        return Response(text, media_type=content_type)

    router.add_api_route("/health", health)
    router.add_api_route("/ping", health, methods=["GET"], operation_id="ping")
    router.add_api_route("/ping", health, methods=["POST"], operation_id="post_ping")
    router.add_api_route("/version", version)
    router.add_api_route("/metrics", prometheus)
    return router

"""What operators ask a server: /health, /ping, /version, /load, /metrics, /start_profile, /stop_profile; in development
mode also /server_info and /reset_prefix_cache."""

from __future__ import annotations

import dataclasses

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from jaxserve.config import ServerConfig
from jaxserve.errors import EngineDeadError
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.server.errors import error_response
from jaxserve.server.generation import GenerationService
from jaxserve.server.openai.responses import json_response
from jaxserve.version import __version__

SECRET_SETTINGS = frozenset({"api_key", "api_key_file", "ssl_keyfile"})
"""Never shown."""


def operation_routes(service: GenerationService, metrics: EngineMetrics, config: ServerConfig) -> APIRouter:
    router = APIRouter()

    async def health() -> Response:
        """200 while the engine lives, 503 after it died."""
        reason = service.engine.errored
        if reason is None:
            return Response()
        return error_response(EngineDeadError(f"The engine has stopped: {reason}"))

    async def version() -> Response:
        return json_response({"version": __version__})

    async def load() -> Response:
        """Prompts being answered; 0 unless the server was started with ``--enable-server-load-tracking``."""
        return json_response({"server_load": service.num_active if config.enable_server_load_tracking else 0})

    async def prometheus() -> Response:
        """Prometheus' text format."""
        text, content_type = metrics.render()
        return Response(text, media_type=content_type)

    router.add_api_route("/health", health)
    router.add_api_route("/ping", health, methods=["GET"], operation_id="ping")
    router.add_api_route("/ping", health, methods=["POST"], operation_id="post_ping")
    router.add_api_route("/version", version)
    router.add_api_route("/load", load)
    router.add_api_route("/metrics", prometheus)
    _add_profile_routes(router, service)
    if config.enable_dev_mode:
        _add_development_routes(router, service, config)
    return router


def _add_profile_routes(router: APIRouter, service: GenerationService) -> None:
    async def start_profile() -> Response:
        """Begin a JAX profile of the engine; refused unless it was started with ``--profiler-dir``."""
        await service.engine.start_profile()
        return Response()

    async def stop_profile() -> Response:
        """End the profile and write it to the engine's ``--profiler-dir``."""
        await service.engine.stop_profile()
        return Response()

    router.add_api_route("/start_profile", start_profile, methods=["POST"])
    router.add_api_route("/stop_profile", stop_profile, methods=["POST"])


def _add_development_routes(router: APIRouter, service: GenerationService, config: ServerConfig) -> None:
    async def server_info() -> Response:
        """Settings, without secrets, and what the engine resolved."""
        settings = {
            name: value for name, value in dataclasses.asdict(config).items() if name not in SECRET_SETTINGS
        }
        info = {
            "version": __version__,
            "server": settings,
            "engine": msgspec.to_builtins(service.engine.info),
        }
        return json_response(info)

    async def reset_prefix_cache() -> Response:
        """Forget all cached prefixes; running requests go on."""
        await service.engine.reset_prefix_cache()
        return Response()

    router.add_api_route("/server_info", server_info)
    router.add_api_route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"])

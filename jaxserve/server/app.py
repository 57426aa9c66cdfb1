"""create_app: the HTTP application over an engine.

There is no module state: two applications can live side by side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from jaxserve.config import ServerConfig
from jaxserve.engine.protocol import EngineClient
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.metrics.http_metrics import HTTPMetrics
from jaxserve.server.anthropic.messages import message_routes
from jaxserve.server.errors import install_error_handlers
from jaxserve.server.generation import GenerationService, ServedModel, ServiceLimits
from jaxserve.server.invocations import invocation_routes
from jaxserve.server.middleware import APIKeyMiddleware, RequestMiddleware
from jaxserve.server.openai.chat import chat_routes
from jaxserve.server.openai.chat_batch import batch_chat_routes
from jaxserve.server.openai.completions import completion_routes
from jaxserve.server.openai.generate import generate_routes
from jaxserve.server.openai.models import model_routes
from jaxserve.server.openai.responses_api.routes import response_routes
from jaxserve.server.openai.responses_api.store import ResponseStore
from jaxserve.server.openai.tokenize import tokenize_routes
from jaxserve.server.openai.tool_output import parsers_of
from jaxserve.server.openapi import install_openapi
from jaxserve.server.operations import operation_routes
from jaxserve.server.page.routes import load_page, page_enabled, page_paths, page_routes
from jaxserve.version import __version__


def create_app(
    engine: EngineClient,
    config: ServerConfig,
    model_names: Sequence[str],
    *,
    model_root: str | None = None,
    chat_template: str | None = None,
) -> FastAPI:
    """The application that serves ``engine``.

    Args:
        engine: a running engine; its metrics are attached to the application's registry.
        config: where and how it listens; here its API keys, CORS origins and body limit count.
        model_names: the names under which the model is served; the first is reported.
        model_root: where the model came from, for /v1/models. Default: the first name.
        chat_template: a template's text that replaces the model's own.
    """
    names = tuple(model_names)
    metrics = EngineMetrics(names[0], engine.info.max_model_len)
    metrics.record_cache_config(block_size=engine.info.block_size, num_gpu_blocks=engine.info.num_blocks)
    engine.attach_metrics(metrics)
    model = ServedModel(names, model_root or names[0], int(time.time()))
    service = GenerationService(
        engine,
        model,
        metrics,
        chat_template,
        parsers=parsers_of(engine, config, chat_template),
        auto_tool_choice=config.enable_auto_tool_choice,
        limits=ServiceLimits(
            max_n=config.max_n,
            trust_request_chat_template=config.trust_request_chat_template,
            report_cached_tokens=config.enable_prompt_tokens_details,
            log_requests=config.enable_log_requests,
        ),
    )

    app = FastAPI(title="jaxserve", version=__version__, redoc_url=None)
    app.state.service = service
    app.state.max_body_bytes = config.max_body_bytes
    app.state.sse_keep_alive_interval = config.sse_keep_alive_interval
    app.include_router(chat_routes(service))
    app.include_router(completion_routes(service))
    # Several processes would each have a store of their own, and find a response once in a while.
    store_bytes = config.response_store_bytes if config.api_server_count == 1 else 0
    store = ResponseStore(store_bytes, config.response_store_ttl)
    app.include_router(response_routes(service, store))
    app.include_router(message_routes(service))
    app.include_router(model_routes(service))
    app.include_router(tokenize_routes(service))
    app.include_router(generate_routes(service))
    app.include_router(batch_chat_routes(service))
    app.include_router(invocation_routes(app.router))
    app.include_router(operation_routes(service, metrics, config))
    page = load_page() if page_enabled(config) else {}
    if page:
        app.include_router(page_routes(page))
    install_error_handlers(app)
    install_openapi(app, names)
    _add_middleware(app, config, HTTPMetrics(metrics.registry), page_paths(page) if page else frozenset())
    return app


def _add_middleware(
    app: FastAPI, config: ServerConfig, metrics: HTTPMetrics, open_paths: frozenset[str]
) -> None:
    """The last one added is the outermost."""
    if config.api_key:
        app.add_middleware(APIKeyMiddleware, keys=config.api_key, open_paths=open_paths)
    if config.allowed_origins:
        # Outside the keys: a browser asks for permission without one.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    app.add_middleware(RequestMiddleware, metrics=metrics, send_ids=config.enable_request_id_headers)

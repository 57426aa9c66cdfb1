"""build: the Ray Serve application of an engine, from the flags of ``jaxserve serve``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from jaxserve.cli.serve import PACKAGED_MODEL_NAME, configs_from, served_names
from jaxserve.config import ENGINE_CONFIGS, EngineConfig, HostsConfig, ServerConfig
from jaxserve.config.cli_flags import add_config_flags, config_from_flags, flag_name
from jaxserve.config.config_file import as_flags
from jaxserve.engine.front import read_chat_template
from jaxserve.errors import ConfigError
from jaxserve.parsers.registry import check_names
from jaxserve.ray_serve.config import RayServeConfig
from jaxserve.ray_serve.ingress import Ingress
from jaxserve.ray_serve.replica import EngineReplica, ReplicaTask
from jaxserve.ray_serve.request_router import prefix_request_router

LISTENING = frozenset({"host", "port", "root_path", "ssl_keyfile", "ssl_certfile"})
"""Settings of Serve's own HTTP proxy, which is not a part of the application."""
NOT_HERE = frozenset(
    {
        "uds", "api_server_count", "ssl_ca_certs", "ssl_cert_reqs", "response_store_bytes", "response_store_ttl",
        "enable_request_id_headers",
    }
)  # fmt: skip
"""Settings of a server that mean nothing here. Each replica would store responses that the others do not know; request
ids are sent by Serve's proxy, always."""
SERVER_SETTINGS = frozenset(field.name for field in dataclasses.fields(ServerConfig)) - NOT_HERE
MAX_ONGOING = 1 << 16
"""Requests that a replica takes at once: the engine queues them, and knows better than Ray how many it runs."""
HEALTH_CHECK_SECONDS = 5.0
RESOURCES = {"gpu": "GPU", "tpu": "TPU"}
"""Ray's names."""


def build(arguments: Mapping[str, Any]) -> Any:
    """The application, for ``serve run jaxserve.ray_serve:build model=… replicas=2`` and Serve's config files.

    Args:
        arguments: flags of ``jaxserve serve`` and of RayServeConfig, by name; those of the HTTP proxy are Serve's
            own (``http_options``).

    Raises:
        ConfigError: an argument that is unknown or cannot be honoured.
    """
    parser = _Parser(prog="jaxserve.ray_serve", allow_abbrev=False)
    add_flags(parser, SERVER_SETTINGS - LISTENING)
    words: list[str] = []
    for name, value in arguments.items():
        words += _flag(name, value)
    engine, server, ray_config = configs(parser.parse_args(words))
    if server.page is None:
        server = replace(server, page=False)  # where Serve's proxy listens is not known here
    return build_application(engine, server, ray_config)


def build_application(engine: EngineConfig, server: ServerConfig, ray_config: RayServeConfig) -> Any:
    """The application, from configs. Ray must be connected if ``accelerator`` is auto."""
    serve = import_serve()
    from ray.serve.config import RequestRouterConfig

    check_names(server.tool_call_parser, server.reasoning_parser)
    model = engine.model_config.model
    task = ReplicaTask(
        replace(
            engine, hosts_config=HostsConfig(nnodes=1)
        ),  # the nodes of a TPU pod have replicas of their own
        replace(server, response_store_bytes=0, enable_request_id_headers=False),
        tuple(served_names(model, server)),
        model or PACKAGED_MODEL_NAME,
        read_chat_template(engine.model_config.chat_template),
    )
    replicas = serve.deployment(EngineReplica).options(
        name="EngineReplica",
        **replica_options(ray_config, engine.parallel_config.num_devices, server.shutdown_timeout),
        request_router_config=RequestRouterConfig(
            request_router_class=prefix_request_router(),
            request_router_kwargs={"prefix_weight": ray_config.prefix_weight},
        ),
    )
    ingress = serve.deployment(Ingress).options(
        name="Ingress", num_replicas=ray_config.routers, max_ongoing_requests=MAX_ONGOING
    )
    return ingress.bind(
        replicas.bind(task), server.max_body_bytes, engine.compilation_config.log_level,
        engine.observability_config.log_format,
    )  # fmt: skip


def replica_options(config: RayServeConfig, num_devices: int, shutdown_timeout: float) -> dict[str, Any]:
    """The options of the EngineReplica deployment, but for its router."""
    actor: dict[str, Any] = {"num_cpus": config.cpus_per_replica}
    accelerator = config.accelerator if config.accelerator != "auto" else _accelerator_of_cluster()
    if accelerator == "gpu":
        actor["num_gpus"] = num_devices
    elif accelerator == "tpu":
        actor["resources"] = {"TPU": num_devices}
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        "max_ongoing_requests": MAX_ONGOING,
        "health_check_period_s": HEALTH_CHECK_SECONDS,
        "graceful_shutdown_timeout_s": shutdown_timeout,
        "graceful_shutdown_wait_loop_s": min(1.0, shutdown_timeout) or 0.1,
    }
    if config.max_replicas is None:
        return options | {"num_replicas": config.replicas}
    scaling = {
        "min_replicas": config.replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.requests_per_replica,
    }
    return options | {"autoscaling_config": scaling}


def _accelerator_of_cluster() -> str:
    import ray

    resources: dict[str, float] = ray.cluster_resources()
    return next((name for name, key in RESOURCES.items() if resources.get(key, 0) > 0), "cpu")


def import_serve() -> Any:
    """Ray Serve.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            f"Replicas on Ray need Ray Serve, which is not installed here ({error}): pip install 'jaxserve[ray]'."
        ) from None
    return serve


# --- flags ----------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, server_settings: frozenset[str]) -> None:
    """Those of the engine (of one host), those ``server_settings`` of the server, and those of RayServeConfig."""
    add_config_flags(parser, [config for config in ENGINE_CONFIGS if config is not HostsConfig])
    add_config_flags(parser, [ServerConfig], only=server_settings)
    add_config_flags(parser, [RayServeConfig])


def configs(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig, RayServeConfig]:
    """The configs that parsed flags describe."""
    if not hasattr(arguments, "positional_model"):
        arguments.positional_model = None
    return *configs_from(arguments), config_from_flags(RayServeConfig, arguments)


class _Parser(argparse.ArgumentParser):
    """One whose mistakes are errors of ours: Ray's controller must not exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"jaxserve.ray_serve: {message}")


def _flag(name: str, value: Any) -> list[str]:
    """An argument as words of a command line; ``serve run`` gives every value as a string."""
    if value in ("true", "True", "false", "False"):
        value = value in ("true", "True")
    return as_flags(flag_name(name.replace("-", "_")), value)

"""``jaxserve serve-ray [MODEL]``: serve a model with several engines, on a Ray cluster."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from typing import Any

from jaxserve.config import ServerConfig
from jaxserve.config.config_file import FLAG, expand_config_file
from jaxserve.errors import EngineDeadError
from jaxserve.logs import configure_logging
from jaxserve.ray_serve.application import (
    SERVER_SETTINGS,
    add_flags,
    build_application,
    configs,
    import_serve,
)
from jaxserve.server.run import STOP_SIGNALS, bind_socket, check_tls_files

logger = logging.getLogger(__name__)

APPLICATION = "jaxserve"

expand = expand_config_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "positional_model",
        metavar="MODEL",
        nargs="?",
        help="Hugging Face folder, hub id, or .gguf file, found by every node. Default: the packaged SmolLM2.",
    )
    parser.add_argument(FLAG, metavar="FILE", help="YAML file with flags; those given here win.")
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="Of the Ray cluster. Default: RAY_ADDRESS, else one that runs on this machine, else a new one.",
    )
    add_flags(parser, SERVER_SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    configure_logging(getattr(arguments, "log_level", None), getattr(arguments, "log_format", None))
    engine, server, ray_config = configs(arguments)
    check_tls_files(server)
    serve = import_serve()
    import ray

    stop = threading.Event()
    ray.init(address=arguments.ray_address)
    for number in STOP_SIGNALS:  # after Ray, which sets handlers of its own
        signal.signal(number, lambda *_: stop.set())
    try:
        if not serve.status().proxies:
            bind_socket(server.host, server.port).close()  # a port in use is said at once
        serve.start(http_options=http_options(server))
        _deploy(serve, build_application(engine, server, ray_config), stop)
        scheme = "https" if server.ssl_certfile else "http"
        if not stop.is_set():
            logger.info(
                "Listening on %s://%s:%d, %d replicas", scheme, server.host, server.port, ray_config.replicas
            )
        stop.wait()
        logger.info("Stopping.")
        serve.delete(APPLICATION)
    finally:
        ray.shutdown()  # ends the cluster if it was begun here
    return 0


def _deploy(serve: Any, application: Any, stop: threading.Event) -> None:
    """Wait until the replicas are ready, or until asked to stop.

    Raises:
        EngineDeadError: they cannot start.
    """
    failure: list[BaseException] = []
    done = threading.Event()

    def deploy() -> None:
        try:
            serve.run(application, name=APPLICATION, route_prefix="/")
        except BaseException as error:
            failure.append(error)
            stop.set()
        done.set()

    threading.Thread(target=deploy, daemon=True).start()
    while not done.wait(0.2):
        if stop.is_set():
            return
    if failure:
        raise EngineDeadError(f"The replicas could not start: {failure[0]}") from failure[0]


def http_options(server: ServerConfig) -> dict[str, Any]:
    """What Serve's HTTP proxies are told."""
    return {
        "host": server.host,
        "port": server.port,
        "root_path": server.root_path,
        "ssl_keyfile": server.ssl_keyfile,
        "ssl_certfile": server.ssl_certfile,
    }

"""Several API-server processes over one engine core: started, watched and ended together.

This process starts the core and the servers and serves nothing itself. Each server binds the same port
(SO_REUSEPORT: the kernel spreads connections over them) and talks to the core directly. Whoever dies ends them all:
with the core nothing works, and a server that vanished took its clients' requests along, which only a restart frees.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, cast

import jaxserve
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.core_client import CoreAddress, CoreClient
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.server.run import ABORT_GRACE_SECONDS, StopSignals, bind, bind_socket, check_tls_files
from jaxserve.step import EngineInfo

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
ENGINE_DIED = b"D"
"""What a server reads from its stdin when the core died."""
END_SECONDS = 3 * ABORT_GRACE_SECONDS
"""What a server has beyond ``shutdown_timeout`` to abort what still runs, cut connections off and close its engine."""
CLEAN_EXIT_CODES = (0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Of servers that were asked to end. One that was still starting ends by the signal itself, or, once it handles
signals, with the code that says so: it had no requests yet, so nothing is lost with it."""


@dataclass(frozen=True)
class ServerTask:
    """What an API-server process is told, pickled, on its stdin."""

    engine_config: EngineConfig
    server_config: ServerConfig
    model_names: tuple[str, ...]
    model_root: str | None
    chat_template: str | None
    core: CoreAddress
    info: EngineInfo
    socket_fd: int | None
    """Of the listening socket, where it is shared and not bound by each."""


def run_servers(
    engine_config: EngineConfig,
    config: ServerConfig,
    model_names: Sequence[str],
    *,
    model_root: str | None = None,
    chat_template: str | None = None,
    core_client: Callable[[int], CoreClient] = CoreClient,
) -> int:
    """Serve with ``config.api_server_count`` processes until a signal or a death; must run in the main thread.

    Args:
        engine_config, config, model_names, model_root, chat_template: as ``run_server`` and the engine take them.
        core_client: makes the core's client for a number of servers.

    Returns:
        The exit code: 0 when asked to stop, else 1.

    Raises:
        ConfigError: the address cannot be used, or the engine cannot start as asked.
    """
    check_tls_files(config)
    stop = StopSignals()
    metrics_folder = tempfile.mkdtemp(prefix="jaxserve-metrics-")
    servers: list[APIServer] = []
    with stop.handled(), bind_shared(config) as sock:
        core: CoreClient | None = None
        try:
            core = core_client(config.api_server_count)
            core.start(engine_config)
            info = core.wait_ready()
            if config.uds is None:
                config = replace(config, port=sock.getsockname()[1])
            task = ServerTask(
                engine_config, config, tuple(model_names), model_root, chat_template, core.addresses[0], info,
                None if config.uds is None else sock.fileno(),
            )  # fmt: skip
            for address in core.addresses[1:]:
                servers.append(APIServer(replace(task, core=address), metrics_folder))
            return watch(core, servers, stop, config)
        finally:
            stop.ending()
            for server in servers:
                server.kill()
            if core is not None:
                core.close() if servers else core.kill()
            shutil.rmtree(metrics_folder, ignore_errors=True)
            logger.info("Stopped.")


def bind_shared(config: ServerConfig) -> socket.socket:
    """The socket that keeps the address: a Unix one is handed down, a TCP one only holds the port.

    Raises:
        ConfigError: it cannot be had.
    """
    if config.uds is not None:
        sock = bind(config)
        sock.set_inheritable(True)
        return sock
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            "This platform has no SO_REUSEPORT: several API servers cannot share a port. Leave --api-server-count out.",
            param="api_server_count",
        )
    # Without the option first: with it a port that another server shares would look free.
    with bind_socket(config.host, config.port) as probe:
        port = probe.getsockname()[1]
    return bind_socket(config.host, port, reuse_port=True)


class APIServer:
    """One API-server process.

    Args:
        task: what to serve.
        metrics_folder: where the processes' metrics meet.
    """

    def __init__(self, task: ServerTask, metrics_folder: str) -> None:
        self.index = task.core.client
        package_parent = str(Path(jaxserve.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.server.api_process"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, METRICS_VARIABLE: metrics_folder},
            pass_fds=() if task.socket_fd is None else (task.socket_fd,),
            start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone, which drains them
        )
        payload = pickle.dumps(task)
        self._tell(len(payload).to_bytes(8, "little") + payload)

    def _tell(self, data: bytes) -> None:
        pipe = cast("IO[bytes]", self._process.stdin)
        try:
            pipe.write(data)
            pipe.flush()
        except OSError:
            logger.debug("API server %d is gone already.", self.index)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    def engine_died(self) -> None:
        """Let it tell its clients, and end."""
        self._tell(ENGINE_DIED)

    def drain(self) -> None:
        """Ask it to end as a single server ends on SIGTERM."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now, if it has not ended."""
        if self.exit_code is None:
            self._process.kill()
        self._process.wait()
        cast("IO[bytes]", self._process.stdin).close()


def watch(core: CoreClient, servers: Sequence[APIServer], stop: StopSignals, config: ServerConfig) -> int:
    """Wait until asked to stop or until one is missing; then end the rest. The exit code."""
    asked: list[bool] = []
    core.listen(lambda _: None, lambda error: logger.error("The engine has stopped: %s", error))
    stop.drain_with(lambda: asked.append(True))
    while not asked and core.error is None and all(server.exit_code is None for server in servers):
        time.sleep(POLL_SECONDS)
    died = [] if asked else [server for server in servers if server.exit_code is not None]
    for server in died:
        logger.error("API server %d ended with code %d.", server.index, server.exit_code)
    for server in servers:
        if core.error is not None:
            server.engine_died()
        else:
            server.drain()
    deadline = time.monotonic() + config.shutdown_timeout + END_SECONDS
    while any(server.exit_code is None for server in servers) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    stop.ending()
    failed = [server for server in servers if server.exit_code not in CLEAN_EXIT_CODES]
    for server in failed if core.error is None else ():
        if server.exit_code is None:
            logger.error("API server %d does not end; it is killed.", server.index)
        elif server not in died:
            logger.error("API server %d ended with code %d.", server.index, server.exit_code)
    return 0 if asked and core.error is None and not failed else 1


def dead_core() -> EngineDeadError:
    """What a server's clients are told of."""
    return EngineDeadError("The engine core died.")

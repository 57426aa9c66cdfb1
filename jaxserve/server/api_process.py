"""One of several API-server processes; ``supervisor`` starts it with a pickled ServerTask on stdin.

stdin stays open: a byte says that the core died, its end that the supervisor is gone, and then this process goes too.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import threading
from dataclasses import replace

from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.core_client import AttachedCore
from jaxserve.engine.front import Front
from jaxserve.errors import JaxserveError
from jaxserve.logs import configure_logging
from jaxserve.server.run import bind_socket, serve_on
from jaxserve.server.supervisor import ServerTask, dead_core

logger = logging.getLogger(__name__)


def main() -> int:
    """Serve until told to stop. The exit code; no exception leaves: the interpreter's own end may wait for threads."""
    try:
        return _serve()
    except SystemExit as stopped:  # a signal while it was loading
        return stopped.code if isinstance(stopped.code, int) else 1
    except EOFError as error:
        logger.debug("%s", error)
    except Exception:
        logger.exception("An API server ends")
    return 1


def _serve() -> int:
    stdin = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 it stays open
    size = int.from_bytes(_read_exactly(stdin.fileno(), 8), "little")
    task: ServerTask = pickle.loads(_read_exactly(stdin.fileno(), size))
    config = task.engine_config
    configure_logging(config.compilation_config.log_level, config.observability_config.log_format)
    core = AttachedCore(task.core)
    threading.Thread(target=_watch_supervisor, args=(stdin.fileno(), core), daemon=True).start()
    try:
        return serve_on(
            lambda: _engine(task, core),
            _socket(task),
            task.server_config,
            task.model_names,
            model_root=task.model_root,
            chat_template=task.chat_template,
            supervised=True,
        )
    except JaxserveError as error:
        logger.error("API server %d: %s", task.core.client, error)
        return 1


def _engine(task: ServerTask, core: AttachedCore) -> AsyncEngine:
    config, number = task.engine_config, task.core.client
    # Requests without a seed must not draw the same ones in every server.
    model = replace(config.model_config, seed=config.model_config.seed + (number - 1) * 0x9E3779B97F4A7C15)
    config = replace(config, model_config=model)
    front = Front.load(config.model_config)
    return AsyncEngine(config, core, front, task.info, records_state=number == 1, shares_core=True)


def _socket(task: ServerTask) -> socket.socket:
    config = task.server_config
    if task.socket_fd is not None:
        return socket.socket(fileno=task.socket_fd)
    return bind_socket(config.host, config.port, reuse_port=True)


def _watch_supervisor(fd: int, core: AttachedCore) -> None:
    while os.read(fd, 1):
        core.fail(dead_core())
    os._exit(1)


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = os.read(fd, num_bytes - len(data))
        if not part:
            raise EOFError("The supervisor is gone.")
        data += part
    return data


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # the interpreter's own end would wait for the thread that sits in a read

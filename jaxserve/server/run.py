"""run_server: from a free port to a clean exit.

The port is taken before the engine loads, so that a port in use is said at once and not after a minute.
The process ends with 0 when it was asked to stop, with 1 when the engine died. The first SIGTERM (or
Ctrl-C) drains, a second one exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import multiprocessing
import os
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Generator, Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jaxserve.config import ServerConfig
from jaxserve.engine.protocol import EngineClient
from jaxserve.errors import ConfigError
from jaxserve.server.app import create_app
from jaxserve.server.generation import GenerationService

logger = logging.getLogger(__name__)

ABORT_GRACE_SECONDS = 5
"""Between aborting what still runs and cutting connections off."""
ENGINE_POLL_SECONDS = 0.25
BACKLOG = 2048
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_server(
    start_engine: Callable[[], EngineClient],
    config: ServerConfig,
    model_names: Sequence[str],
    *,
    model_root: str | None = None,
    chat_template: str | None = None,
) -> int:
    """Serve until a signal or the engine's death; must run in the main thread.

    Args:
        start_engine: loads and starts the engine; it takes a while.
        config: where to listen.
        model_names: the names under which the model is served.
        model_root: where the model came from, for /v1/models.
        chat_template: a template's text that replaces the model's own.

    Returns:
        The process's exit code.

    Raises:
        ConfigError: the address cannot be used.
    """
    check_tls_files(config)
    return serve_on(
        start_engine, bind(config), config, model_names, model_root=model_root, chat_template=chat_template
    )


def serve_on(
    start_engine: Callable[[], EngineClient],
    sock: socket.socket,
    config: ServerConfig,
    model_names: Sequence[str],
    *,
    model_root: str | None = None,
    chat_template: str | None = None,
    supervised: bool = False,
) -> int:
    """``run_server`` on a socket that is bound already; it is closed in the end.

    ``supervised``: whoever started this process ends it where it has to end at once, not a second signal.
    """
    stop = StopSignals(second_exits=not supervised)
    with stop.handled(), contextlib.closing(sock):
        engine: EngineClient | None = None
        try:
            engine = start_engine()
            app = create_app(engine, config, model_names, model_root=model_root, chat_template=chat_template)
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_serve(app, engine, sock, config, stop))
        finally:
            stop.ending()
            if engine is not None:
                engine.shutdown()
                logger.info("Stopped.")


def bind(config: ServerConfig) -> socket.socket:
    """The bound socket that the config names: a Unix domain socket, or host and port.

    Raises:
        ConfigError: it cannot be had.
    """
    return bind_socket(config.host, config.port) if config.uds is None else bind_unix_socket(config.uds)


def bind_unix_socket(path: str) -> socket.socket:
    """A bound Unix domain socket that does not listen yet; one that nobody listens to any more is replaced.

    Raises:
        ConfigError: the path is in use, too long, or cannot be written.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(_mode_of(path)):
            if sock.connect_ex(path) == 0:
                raise ConfigError(f"uds {path!r} is in use by another process.", param="uds")
            sock.close()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            os.unlink(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"Cannot listen on uds {path!r}: {error.strerror or error}.", param="uds") from None
    except BaseException:
        sock.close()
        raise
    return sock


def _mode_of(path: str) -> int:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return 0


def check_tls_files(config: ServerConfig) -> None:
    """Read certificate and key now: an error while the engine loads would come minutes later.

    Raises:
        ConfigError: they cannot be read, or do not belong together.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password: asked for one, the process would wait for a terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile!r} (and ssl_keyfile {config.ssl_keyfile!r}) cannot be used: {error}",
            param="ssl_certfile",
        ) from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"ssl_ca_certs {config.ssl_ca_certs!r} cannot be used: {error}", param="ssl_ca_certs"
            ) from None


def bind_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A bound socket that does not listen yet: until the engine is ready, clients are refused.

    Args:
        host, port: where.
        reuse_port: share the port with other sockets that do.

    Raises:
        ConfigError: the address is in use, not ours, or not an address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host {host!r} is not an address: {error}.", param="host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _address_error(host, port, error) from None
    return sock


def _address_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {port} on {host} is in use. Stop what listens there, or choose another port with --port.",
            param="port",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"Port {port} needs more rights; choose one above 1023 with --port.", param="port")
    reason = error.strerror or str(error)
    return ConfigError(f"Cannot listen on {host}, port {port}: {reason}.", param="host")


class StopSignals:
    """SIGTERM and SIGINT: while loading they end the process, while serving the first one drains.

    Args:
        second_exits: whether a second signal ends the process at once, else it is ignored. A process manager that
            signals a whole group reaches an API server twice: itself, and through the supervisor.
    """

    def __init__(self, *, second_exits: bool = True) -> None:
        self._second_exits = second_exits
        self._on_first: Callable[[], None] | None = None
        """Unset while there is nothing to drain."""
        self._received = 0

    def drain_with(self, begin: Callable[[], None]) -> None:
        """From now on the first signal calls ``begin``, which begins draining."""
        self._on_first = begin
        if self._received:
            # It came while loading and should have ended the process, but Python drops an exception that is raised
            # in a ``__del__`` or a weak reference's callback.
            begin()

    def ending(self) -> None:
        """From now on the first signal changes nothing: the process ends already."""
        self._on_first = lambda: None

    @contextlib.contextmanager
    def handled(self) -> Generator[None, None, None]:
        """Handle the signals in here, and restore what was before."""
        before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._received += 1
        if self._received > 1:
            if self._second_exits:
                _exit_now(number)
        elif self._on_first is None:
            raise SystemExit(128 + number)
        else:
            self._on_first()


def _exit_now(number: int) -> None:
    """End this process and its children without waiting for anything."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


class Server(uvicorn.Server):
    """uvicorn, with our signals and our messages."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        scheme = "https" if self.config.is_ssl else "http"
        for sock in sockets or ():
            if sock.family == socket.AF_UNIX:
                logger.info("Listening on the Unix domain socket %s", sock.getsockname())
                continue
            host, port = sock.getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            logger.info("Listening on %s://%s, documentation at /docs", scheme, address)


async def _serve(
    app: FastAPI, engine: EngineClient, sock: socket.socket, config: ServerConfig, stop: StopSignals
) -> int:
    service: GenerationService = app.state.service
    server = Server(_uvicorn_config(app, config))
    loop = asyncio.get_running_loop()
    drain = Drain(service, server, config.shutdown_timeout)

    def begin_draining() -> None:
        loop.call_soon_threadsafe(drain.begin)

    stop.drain_with(begin_draining)
    watcher = asyncio.create_task(_watch_engine(engine, drain))
    try:
        await server.serve(sockets=[sock])
    except OSError as error:  # another process began to listen here while the engine loaded
        raise _address_error(config.host, config.port, error) from None
    finally:
        stop.ending()
        watcher.cancel()
    return 0 if engine.errored is None else 1


class Drain:
    """The end of a server: refuse what is new, wait for what runs, then abort the rest."""

    def __init__(self, service: GenerationService, server: Server, timeout: float) -> None:
        self._service = service
        self._server = server
        self._timeout = timeout
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start draining; the server ends by itself once the last connection has its answer."""
        self._server.should_exit = True
        self._service.draining = True
        if self._task is None:
            running = self._service.num_active
            logger.info("Stopping: %d running, waiting up to %g s for them.", running, self._timeout)
            self._task = asyncio.ensure_future(self._abort_later())

    async def _abort_later(self) -> None:
        await asyncio.sleep(self._timeout)
        if self._service.num_active:
            logger.info("Aborting %d that still run.", self._service.num_active)
            await self._service.abort_all()


async def _watch_engine(engine: EngineClient, drain: Drain) -> None:
    while engine.errored is None:
        await asyncio.sleep(ENGINE_POLL_SECONDS)
    logger.error("The engine has stopped: %s", engine.errored)
    drain.begin()


def _uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        root_path=config.root_path,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + ABORT_GRACE_SECONDS,
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

"""A host that follows: it makes the calls that host 0 makes, in the same order, until it is told to end."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.engine.factory import create_runner
from jaxserve.engine.host_channel import HostChannel
from jaxserve.engine.hosts import (
    JOIN_SECONDS,
    Close,
    Execute,
    Failed,
    Hello,
    Hosts,
    Initialize,
    Read,
    Ready,
    Refused,
    SentMask,
    ToFollower,
    comparable,
    end_engine,
    join,
    leave,
)
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.step import ModelRunner, PendingStep
from jaxserve.version import __version__

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5


def follow(config: EngineConfig, hosts: Hosts) -> int:
    """Follow host 0 to the end; must run in the main thread.

    Args:
        config: as host 0 has it.
        hosts: ``rank`` is not 0.

    Returns:
        0: host 0 said that this is the end. Whatever else happens ends the process with 1.

    Raises:
        ConfigError: host 0 cannot be reached, or refuses this host.
    """
    channel = _connect(config, hosts)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def on_message(message: ToFollower) -> None:
        if isinstance(message, Close):
            channel.expect_end()  # host 0 may be gone before this host has come to it
        messages.put(message)

    with _stop_signals_left_to_host_0():
        channel.listen(on_message, end_engine)
        try:
            join(hosts)
            follower = Follower(create_runner(config)[0], channel)
            while follower.handle(messages.get()):
                pass
        except Exception as error:
            # What a user asked for in vain needs no traceback: ``end_engine`` says it.
            logger.error("This host cannot go on", exc_info=not isinstance(error, JaxserveError))
            with suppress(OSError):
                channel.send(Failed(f"{type(error).__name__}: {error}"))
            time.sleep(RETRY_SECONDS)  # for it to arrive before the end of the connection does
            end_engine(f"This host has failed: {error}")
        left = leave()
    logger.info("Stopped.")
    if not left:
        logging.shutdown()
        os._exit(0)  # JAX would go on waiting for the others when the interpreter ends
    return 0


class Follower:
    """A runner and the steps of it that were not read."""

    def __init__(self, runner: ModelRunner, channel: HostChannel) -> None:
        self._runner = runner
        self._channel = channel
        self._unread: deque[PendingStep] = deque()

    def handle(self, message: ToFollower) -> bool:
        """Do what host 0 does; False when it ends."""
        match message:
            case Initialize():
                self._channel.send(Ready(repr(self._runner.initialize())))
                logger.info("Following host 0")
            case Execute(step, masks):
                step.token_masks = {request_id: SentMask(data) for request_id, data in masks.items()}
                self._unread.append(self._runner.execute(step))
            case Read():
                self._unread.popleft().result()
            case Close():
                self._runner.close()
                return False
            case _:
                raise ValueError(f"{message!r} is not for now")
        return True


def _connect(config: EngineConfig, hosts: Hosts) -> HostChannel:
    """Wait for host 0, and be taken."""
    deadline = time.monotonic() + JOIN_SECONDS
    address = (hosts.address, hosts.port + 1)
    logger.info("Host %d of %d: looking for host 0 at %s, port %d", hosts.rank, hosts.count, *address)
    while True:
        try:
            sock = socket.create_connection(address, timeout=10)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"Host 0 at {address[0]}, port {address[1]}, cannot be reached: {error.strerror or error}.",
                    param="coordinator",
                ) from None
            time.sleep(RETRY_SECONDS)
    sock.settimeout(JOIN_SECONDS)  # whatever listens there may not be host 0, and say nothing
    channel = HostChannel(sock, ToFollower, f"Host 0 ({address[0]})")
    try:
        channel.send(Hello(hosts.rank, __version__, comparable(config)))
        answer = channel.receive()
    except TimeoutError:
        raise ConfigError(
            f"Host 0 at {address[0]}, port {address[1]}, has taken the connection and not answered for "
            f"{JOIN_SECONDS:.0f} s: not all hosts have come, or something else listens there.",
            param="coordinator",
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"Host 0 has left before all hosts were there: {error}.", param="coordinator"
        ) from None
    sock.settimeout(None)
    if isinstance(answer, Refused):
        raise ConfigError(f"Host 0 refuses this host: {answer.message}", param="nnodes")
    return channel


@contextmanager
def _stop_signals_left_to_host_0() -> Generator[None, None, None]:
    """Process managers signal all hosts: host 0 drains and then ends the others. A second signal ends this one."""
    received: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        logger.info("Host 0 ends this host when it has drained; once more to end at once.")

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

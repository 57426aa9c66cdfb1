"""The front process's end of an engine core that runs in a process of its own.

CoreClient starts the core. With several API servers the starting process only watches, and each server has an
AttachedCore: the core takes everybody's requests from one socket and answers each one on its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import zmq

import jaxserve.errors as errors
from jaxserve.config import EngineConfig
from jaxserve.engine.wire import (
    Abort,
    Add,
    Died,
    FromCore,
    Outputs,
    Profile,
    Profiled,
    Ready,
    ResetPrefixCache,
    StartFailed,
    Stop,
    ToCore,
)
from jaxserve.errors import EngineDeadError, JaxserveError
from jaxserve.step import EngineCoreOutputs, EngineCoreRequest, EngineInfo

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 200
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class CoreAddress:
    """Where a client reaches a core: ZMQ endpoints, and the client's number among the core's clients."""

    input: str
    output: str
    client: int = 0


class AttachedCore:
    """Carries messages to and from a core that is there. ``listen`` first.

    Args:
        address: from ``CoreClient.addresses``; each is for one client.
    """

    def __init__(self, address: CoreAddress) -> None:
        self._client = address.client
        self._context = zmq.Context()
        self._sender = self._socket(zmq.PUSH)
        self._sender.connect(address.input)
        self._receiver = self._socket(zmq.PULL)
        self._receiver.bind(address.output)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._reader: threading.Thread | None = None
        self._closing = threading.Event()
        self._on_death: Callable[[BaseException], None] | None = None
        self._calls: dict[int, Future[str | None]] = {}
        """Calls that were not answered yet."""
        self._call_ids = itertools.count()
        self.error: BaseException | None = None
        """Why the core died."""

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    @property
    def pid(self) -> int | None:
        """The core's process id, where this process started it."""
        return None

    def _receive(self) -> FromCore | None:
        """The next message, or None after a while without one."""
        if self._receiver.poll(POLL_MILLISECONDS):
            return self._decoder.decode(self._receiver.recv())
        return None

    def listen(
        self, on_outputs: Callable[[EngineCoreOutputs], None], on_death: Callable[[BaseException], None]
    ) -> None:
        """Read in a thread from now on; both callbacks are called in it."""
        self._on_death = on_death

        def read() -> None:
            try:
                while not self._closing.is_set():
                    message = self._receive()
                    if isinstance(message, Outputs):
                        on_outputs(message.outputs)
                    elif isinstance(message, Profiled):
                        call = self._calls.pop(message.call, None)
                        # A call may have been cancelled; once it runs it cannot be.
                        if call is not None and call.set_running_or_notify_cancel():
                            call.set_result(message.error)
                    elif isinstance(message, Died):
                        raise EngineDeadError(f"The engine core died: {message.message}")
            except BaseException as error:
                self.fail(error)

        self._reader = threading.Thread(target=read, name="engine-outputs", daemon=True)
        self._reader.start()

    def fail(self, error: BaseException) -> None:
        """Say that the core is dead; only the first reason counts. From any thread."""
        if self._closing.is_set() or self.error is not None:
            return
        self.error = error
        while self._calls:
            _, call = self._calls.popitem()
            if call.set_running_or_notify_cancel():
                call.set_exception(EngineDeadError(str(error)))
        if self._on_death is not None:
            self._on_death(error)

    def add(self, requests: list[EngineCoreRequest]) -> None:
        """Admit the ``n`` choices of one prompt."""
        self._send(Add.of(requests, self._client))

    def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown ids are ignored."""
        self._send(Abort(request_ids))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._send(ResetPrefixCache())

    def profile(self, *, start: bool) -> Future[str | None]:
        """Begin a profile of the core, or end it; what kept it from that, or None."""
        call: Future[str | None] = Future()
        number = next(self._call_ids)
        self._calls[number] = call
        if self.error is not None:  # since the caller looked; nobody would answer
            raise EngineDeadError(str(self.error))
        self._send(Profile(number, start, self._client))
        return call

    def _send(self, message: ToCore) -> None:
        self._sender.send(self._encoder.encode(message))

    def close(self) -> None:
        """Leave the core. Callable twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._end()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(2 * POLL_MILLISECONDS / 1000 + 1)
        self._sender.close()
        self._receiver.close()
        self._context.term()

    def _end(self) -> None:
        """What else is to be ended."""


class CoreClient(AttachedCore):
    """Starts the core's process. ``start`` first, then ``wait_ready``, then ``listen``.

    Args:
        num_servers: further clients, each in a process of its own; without any this one is the only client.
    """

    module = "jaxserve.engine.core_process"
    """What the core's process runs."""

    def __init__(self, num_servers: int = 0) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="jaxserve-"))
        self._process: subprocess.Popen[bytes] | None = None
        input_address = f"ipc://{self._folder / 'input'}"
        outputs = [f"ipc://{self._folder / f'output-{client}'}" for client in range(num_servers + 1)]
        self.addresses = [CoreAddress(input_address, output, i) for i, output in enumerate(outputs)]
        """This client's, then the servers'."""
        super().__init__(self.addresses[0])

    def start(self, config: EngineConfig) -> None:
        """Start the process; it loads while the caller does other things."""
        package_parent = str(Path(errors.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", self.module, self.addresses[0].input]
        self._process = subprocess.Popen(
            [*command, *(address.output for address in self.addresses)],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        # The limits of the queue are the clients': they refuse a request before it is tokenized and sent.
        unlimited = replace(config.scheduler_config, max_num_queued_reqs=None)
        payload = pickle.dumps(replace(config, scheduler_config=unlimited))
        self._process.stdin.write(len(payload).to_bytes(8, "little") + payload)
        self._process.stdin.flush()

    @property
    def pid(self) -> int | None:
        """The core's process id."""
        return None if self._process is None else self._process.pid

    def wait_ready(self) -> EngineInfo:
        """Block until the core is ready.

        Raises:
            JaxserveError: the core's own error, or EngineDeadError when it ended without one.
        """
        while True:
            message = self._receive()
            if isinstance(message, Ready):
                return message.info
            if isinstance(message, StartFailed):
                raise _start_error(message)

    def _receive(self) -> FromCore | None:
        """The next message, or None after a while without one.

        Raises:
            EngineDeadError: the process has ended.
        """
        if self._receiver.poll(POLL_MILLISECONDS):
            return self._decoder.decode(self._receiver.recv())
        assert self._process is not None
        code = self._process.poll()
        if code is not None and not self._receiver.poll(0):
            reason = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise EngineDeadError(f"The engine core {reason}.")
        return None

    def _end(self) -> None:
        """End the process: ask, wait a little, then kill."""
        process = self._process
        if process is not None and process.poll() is None:
            self._send(Stop())
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process is not None and process.stdin is not None:
            process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process at once: it is still loading, and would not read a message."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.close()


def _start_error(message: StartFailed) -> JaxserveError:
    kind = getattr(errors, message.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.ConfigError):
        return kind(message.message, param=message.param)
    if isinstance(kind, type) and issubclass(kind, JaxserveError):
        return kind(message.message)
    return EngineDeadError(f"The engine could not start: {message.message}")

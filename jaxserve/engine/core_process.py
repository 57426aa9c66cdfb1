"""The engine core's own process: a loop around EngineCore that talks to the front process over ZMQ.

Started as ``python -m jaxserve.engine.core_process INPUT OUTPUT…`` with the pickled config on stdin, which stays open:
its end means that the front process is gone, and then this one goes too. There is one OUTPUT a client; the first one's
started this process, and if there are others, it only hears about life and death.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from io import RawIOBase

import msgspec
import zmq

from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore, rejected
from jaxserve.engine.factory import create_core
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
from jaxserve.errors import JaxserveError
from jaxserve.logs import configure_logging
from jaxserve.step import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

logger = logging.getLogger(__name__)

ADMITTED_A_STEP = 256
"""Requests of one message that are admitted before the next step: a prompt's many choices delay nobody."""


class CoreProcess:
    """Reads messages in a thread, steps in the calling one.

    Args:
        input_address: ZMQ endpoint for everybody's messages, bound here.
        output_addresses: endpoints that the clients bind.
    """

    def __init__(self, input_address: str, output_addresses: Sequence[str]) -> None:
        context = zmq.Context()
        self._input = context.socket(zmq.PULL)
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.bind(input_address)
        self._outputs: list[zmq.Socket[bytes]] = []
        for address in output_addresses:
            output = context.socket(zmq.PUSH)
            output.setsockopt(zmq.SNDHWM, 0)
            output.connect(address)
            self._outputs.append(output)
        self._clients: dict[str, int] = {}
        """Request id to client, where there are several."""
        self._admitting: deque[tuple[Iterator[EngineCoreRequest], int]] = deque()
        """Messages whose requests are not all admitted, and their clients."""
        self._aborted: set[str] = set()
        """Ids that were aborted while requests were still to be admitted."""
        self._encoder = msgspec.msgpack.Encoder()
        self._messages: queue.SimpleQueue[ToCore] = queue.SimpleQueue()

    def run(self, config: EngineConfig) -> int:
        """Start the core and serve until told to stop; returns the process's exit code."""
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        try:
            core = create_core(config)
        except JaxserveError as error:
            self._send(StartFailed(type(error).__name__, str(error), getattr(error, "param", None)))
            return 1
        except Exception as error:
            logger.exception("The engine could not start")
            self._send(StartFailed("", f"{type(error).__name__}: {error}"))
            return 1
        # What lives now lives to the end; collections that walk it all stop a step for a tenth of a second.
        gc.collect()
        gc.freeze()
        threading.Thread(target=self._read, daemon=True).start()
        self._send(Ready(core.info))
        try:
            self._loop(core)
        except Exception as error:
            logger.exception("The engine core ends")
            for client in range(len(self._outputs)):
                self._send(Died(f"{type(error).__name__}: {error}"), client)
            return 1
        core.close()
        return 0

    def _loop(self, core: EngineCore) -> None:
        """Step while there is work, else wait for a message."""
        while True:
            while not self._messages.empty() or not (core.has_work() or self._admitting):
                if not self._handle(core, self._messages.get()):
                    return
            self._admit(core)
            if core.has_work():
                self._send_outputs(core.step())

    def _handle(self, core: EngineCore, message: ToCore) -> bool:
        """False when told to stop."""
        match message:
            case Add():
                self._admitting.append((message.requests(), message.client))
            case Abort(request_ids):
                if self._admitting:
                    self._aborted.update(request_ids)
                core.abort(request_ids)
                for request_id in request_ids if len(self._outputs) > 1 else ():
                    self._clients.pop(request_id, None)
                if not core.has_work():
                    self._send_outputs(core.state())
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case Profile(call, start, client):
                self._send(Profiled(call, core.profile(start=start)), client)
            case Stop():
                return False
        return True

    def _admit(self, core: EngineCore) -> None:
        """Admit what has come, but no more than ADMITTED_A_STEP requests of a message: others go on meanwhile."""
        for _ in range(len(self._admitting)):
            requests, client = self._admitting.popleft()
            admitted = 0
            for request in itertools.islice(requests, ADMITTED_A_STEP):
                admitted += 1
                if request.request_id not in self._aborted:
                    self._add_request(core, request, client)
            if admitted == ADMITTED_A_STEP:
                self._admitting.append((requests, client))
        if not self._admitting:
            self._aborted.clear()

    def _add_request(self, core: EngineCore, request: EngineCoreRequest, client: int) -> None:
        try:
            core.add_request(request)
        except JaxserveError as error:
            output = rejected(request.request_id, str(error))
            self._send(Outputs(EngineCoreOutputs([output])), client)
        else:
            if len(self._outputs) > 1:
                self._clients[request.request_id] = client

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        """To each client what is its own, and to all the state."""
        if len(self._outputs) == 1:
            self._send(Outputs(outputs))
            return
        parts: list[list[EngineCoreOutput]] = [[] for _ in self._outputs]
        for output in outputs.outputs:
            client = self._clients.get(output.request_id)
            if client is None:
                continue  # aborted meanwhile
            parts[client].append(output)
            if output.finish_reason is not None or output.error is not None:
                del self._clients[output.request_id]
        for client in range(1, len(self._outputs)):
            self._send(Outputs(EngineCoreOutputs(parts[client], outputs.stats, outputs.timestamp)), client)

    def _send(self, message: FromCore, client: int = 0) -> None:
        self._outputs[client].send(self._encoder.encode(message))

    def flush(self) -> None:
        """Wait until what was sent has left this process."""
        for output in self._outputs:
            output.close(linger=1000)

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToCore)
        while True:
            self._messages.put(decoder.decode(self._input.recv()))


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _read_exactly(stream: RawIOBase, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = stream.read(num_bytes - len(data))
        if not part:
            raise EOFError("The front process is gone.")
        data += part
    return data


def main() -> int:
    # The terminal and process managers signal the whole group: the front process drains first, then stops this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
        config: EngineConfig = pickle.loads(
            _read_exactly(stdin, int.from_bytes(_read_exactly(stdin, 8), "little"))
        )
    configure_logging(config.compilation_config.log_level, config.observability_config.log_format)
    process = CoreProcess(sys.argv[1], sys.argv[2:])
    code = process.run(config)
    process.flush()
    logging.shutdown()
    return code


if __name__ == "__main__":
    # The interpreter's own end would wait for the threads that sit in reads.
    os._exit(main())

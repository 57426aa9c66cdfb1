"""The engine core's own process: a loop around EngineCore that talks to the front process over ZMQ.

Started as ``python -m jaxserve.engine.core_process INPUT OUTPUT`` with the pickled config on stdin, which stays open:
its end means that the front process is gone, and then this one goes too.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import queue
import signal
import sys
import threading
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
    Ready,
    ResetPrefixCache,
    StartFailed,
    Stop,
    ToCore,
)
from jaxserve.errors import JaxserveError
from jaxserve.logs import configure_logging
from jaxserve.step import EngineCoreOutputs

logger = logging.getLogger(__name__)


class CoreProcess:
    """Reads messages in a thread, steps in the calling one.

    Args:
        input_address, output_address: ZMQ endpoints that the front process has bound.
    """

    def __init__(self, input_address: str, output_address: str) -> None:
        context = zmq.Context()
        self._input = context.socket(zmq.PULL)
        self._input.setsockopt(zmq.RCVHWM, 0)
        self._input.connect(input_address)
        self._output = context.socket(zmq.PUSH)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._output.connect(output_address)
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
            self._send(Died(f"{type(error).__name__}: {error}"))
            return 1
        core.close()
        return 0

    def _loop(self, core: EngineCore) -> None:
        """Step while there is work, else wait for a message."""
        while True:
            while not core.has_work() or not self._messages.empty():
                if not self._handle(core, self._messages.get()):
                    return
            self._send(Outputs(core.step()))

    def _handle(self, core: EngineCore, message: ToCore) -> bool:
        """False when told to stop."""
        match message:
            case Add():
                for request in message.requests():
                    try:
                        core.add_request(request)
                    except JaxserveError as error:
                        output = rejected(request.request_id, str(error))
                        self._send(Outputs(EngineCoreOutputs([output])))
            case Abort(request_ids):
                core.abort(request_ids)
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case Stop():
                return False
        return True

    def _send(self, message: FromCore) -> None:
        self._output.send(self._encoder.encode(message))

    def flush(self) -> None:
        """Wait until what was sent has left this process."""
        self._output.close(linger=1000)

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
    configure_logging(config.compilation_config.log_level)
    process = CoreProcess(sys.argv[1], sys.argv[2])
    code = process.run(config)
    process.flush()
    logging.shutdown()
    return code


if __name__ == "__main__":
    # The interpreter's own end would wait for the threads that sit in reads.
    os._exit(main())

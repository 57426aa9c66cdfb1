"""HostChannel: messages between two hosts of one engine, in order and without loss, and a watch over the other's life.

One TCP connection: whatever breaks it (the other process's end above all) is noticed at once. Beats go both ways, so a
host that vanished without a word, or a network that drops everything, is noticed within DEATH_SECONDS.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

BEAT_SECONDS = 2.0
DEATH_SECONDS = 20.0
"""Without a beat for so long the other host is taken for dead."""
_LENGTH = struct.Struct("<I")


class Beat(msgspec.Struct, tag=True):
    """The sender lives."""


class HostChannel:
    """One end of a connection. Sending is safe from any thread.

    Args:
        sock: connected; it belongs to the channel from now on.
        receives: the union of messages that come, Beat among them.
        name: of the other host, for messages.
    """

    def __init__(self, sock: socket.socket, receives: Any, name: str) -> None:
        self.name = name
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._heard = time.monotonic()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Seconds and microseconds: a host that reads nothing for so long is as good as dead.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(DEATH_SECONDS), 0))

    def send(self, message: msgspec.Struct) -> None:
        """Send.

        Raises:
            OSError: the other host is gone.
        """
        data = self._encoder.encode(message)
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next message that is not a beat.

        Raises:
            OSError: the other host is gone.
        """
        while True:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            message = self._decoder.decode(self._read(length))
            self._heard = time.monotonic()
            if not isinstance(message, Beat):
                return message

    def _read(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = self._socket.recv(num_bytes - len(parts))
            if not part:
                raise ConnectionResetError("it closed the connection")
            parts += part
        return bytes(parts)

    def listen(self, on_message: Callable[[Any], None], on_death: Callable[[str], None]) -> None:
        """Read, beat and watch from now on, in threads that call these. A death is told once, unless ``close`` was."""
        self._heard = time.monotonic()

        def die(reason: str) -> None:
            if not self._closing.is_set():
                self._closing.set()
                on_death(reason)

        def read() -> None:
            try:
                while True:
                    on_message(self.receive())
            except (OSError, msgspec.MsgspecError) as error:
                die(f"{self.name} is gone: {error}.")

        def beat() -> None:
            try:
                while not self._closing.wait(BEAT_SECONDS):
                    self.send(Beat())
            except OSError as error:
                die(f"{self.name} is gone: {error}.")

        def watch() -> None:
            while not self._closing.wait(BEAT_SECONDS / 2):
                silent = time.monotonic() - self._heard
                if silent > DEATH_SECONDS:
                    die(f"{self.name} has not been heard of for {silent:.0f} s.")

        for target in (read, beat, watch):
            threading.Thread(target=target, name=f"host-{target.__name__}", daemon=True).start()

    def expect_end(self) -> None:
        """The other host may go from now on."""
        self._closing.set()

    def close(self) -> None:
        """End the connection; the other host notices. Callable twice."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

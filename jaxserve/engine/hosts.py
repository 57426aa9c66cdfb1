"""An engine over several hosts: which ones there are, and how host 0 has the others do what it does.

Central idea: one JAX program has a process on every host, and a step runs when all of them run it, on the same inputs.
Host 0 alone schedules. Its runner is a LeaderRunner, which sends every call to the other hosts before it makes it
itself; they (``follower``) make the same calls in the same order, so all hosts' rows, caches and programs agree without
anything else being exchanged. Nothing waits for an answer: two steps stay in flight.

A host that dies ends all the others: without its devices no step can end. So does a step that fails on any host, since
nobody can know what the others have of it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from jaxserve.config import EngineConfig, HostsConfig
from jaxserve.engine.host_channel import Beat, HostChannel
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.step import ModelRunner, ModelRunnerOutput, PendingStep, RunnerInfo, SchedulerOutput
from jaxserve.version import __version__

logger = logging.getLogger(__name__)

JOIN_SECONDS = 600.0
"""For all hosts to be there."""
HELLO_SECONDS = 10.0
"""For a host that connects to say who it is."""
END_SECONDS = 3.0
"""For the other hosts to end when they are told to."""
DEFAULT_PORT = 8482
"""Of JAX's coordination service where the hosts are found by themselves; host 0 listens on the next one, too."""
METADATA_SECONDS = 3.0


# --- who there is ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """The hosts of one engine.

    Args:
        address: of host 0.
        port: of JAX's coordination service there; the next port is for the steps.
        count: of hosts.
        rank: this host's, from 0.
    """

    address: str
    port: int
    count: int
    rank: int

    @property
    def coordinator(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def find_hosts(config: HostsConfig) -> Hosts | None:
    """The hosts that the flags name, else those of a Cloud TPU pod; None for one host alone."""
    if config.nnodes == 1:
        return None
    if config.coordinator is not None:
        assert config.nnodes is not None
        assert config.node_rank is not None
        address, _, port = config.coordinator.rpartition(":")
        return Hosts(address.strip("[]"), int(port), config.nnodes, config.node_rank)
    found = _pod_of(os.environ) or _pod_of_metadata()
    if found is None:
        if config.nnodes is not None:
            raise ConfigError(
                f"nnodes is {config.nnodes}, but no Cloud TPU pod was found here: name host 0 with --coordinator "
                "HOST:PORT, and each host's --node-rank.",
                param="coordinator",
            )
        return None
    if config.nnodes not in (None, found.count):
        raise ConfigError(f"nnodes is {config.nnodes}, but the pod has {found.count} hosts.", param="nnodes")
    return found


def _pod_of(variables: Mapping[str, str]) -> Hosts | None:
    """The pod that a TPU pod's environment describes (GKE)."""
    names = variables.get("TPU_PROCESS_ADDRESSES") or variables.get("TPU_WORKER_HOSTNAMES") or ""
    return _pod(names, variables.get("TPU_WORKER_ID", ""))


def _pod_of_metadata() -> Hosts | None:
    """The pod that a TPU VM belongs to, by its metadata server."""
    has_tpu = Path("/dev/accel0").exists() or any(Path("/dev/vfio").glob("[0-9]*"))
    if not has_tpu or "TPU_SKIP_MDS_QUERY" in os.environ:
        return None
    try:
        # Old form: name:id:address, of each worker.
        names = [part.split(":")[-1] for part in _metadata("worker-network-endpoints").split(",")]
        return _pod(",".join(names), _metadata("agent-worker-number"))
    except OSError:
        return None


def _metadata(key: str) -> str:
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=METADATA_SECONDS) as response:
        return response.read().decode()


def _pod(names: str, worker: str) -> Hosts | None:
    addresses = [name.split(":")[0].strip() for name in names.split(",") if name.strip()]
    if len(addresses) < 2 or not worker.strip().isdecimal():
        return None
    return Hosts(addresses[0], DEFAULT_PORT, len(addresses), int(worker))


# --- what is said ---------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True):
    """A follower's first message: who it is, and what it was told to serve."""

    rank: int
    version: str
    config: dict[str, str]


class Ready(msgspec.Struct, tag=True):
    """A follower has initialized its runner; ``info`` must be everybody's."""

    info: str


class Failed(msgspec.Struct, tag=True):
    """A follower could not do what it was told, and ends."""

    message: str


class Welcome(msgspec.Struct, tag=True):
    """All hosts are there."""


class Refused(msgspec.Struct, tag=True):
    """The follower does not fit."""

    message: str


class Initialize(msgspec.Struct, tag=True):
    """``ModelRunner.initialize``."""


class Execute(msgspec.Struct, tag=True):
    """``ModelRunner.execute``; the masks, which may still be worked out, travel as int32 words."""

    step: SchedulerOutput
    masks: dict[str, bytes]


class Read(msgspec.Struct, tag=True):
    """``PendingStep.result`` of the oldest step that was not read."""


class Close(msgspec.Struct, tag=True):
    """``ModelRunner.close``, and the end."""


ToLeader = Hello | Ready | Failed | Beat
ToFollower = Welcome | Refused | Initialize | Execute | Read | Close | Beat


@dataclass(frozen=True)
class SentMask:
    """A token mask as it was sent."""

    data: bytes

    def words(self) -> np.ndarray:
        """int32[ceil(V / 32)]."""
        return np.frombuffer(self.data, np.int32)


def execute_message(step: SchedulerOutput) -> Execute:
    """``step`` as it is sent."""
    masks = {request_id: mask.words().tobytes() for request_id, mask in step.token_masks.items()}
    return Execute(replace(step, token_masks={}) if masks else step, masks)


def comparable(config: EngineConfig) -> dict[str, str]:
    """Settings that all hosts must share, as text; not those of the queue, which is host 0's alone."""
    parts = {
        name: part
        for name, part in asdict(config).items()
        if name not in ("hosts_config", "observability_config")
    }
    values = {name: repr(value) for part in parts.values() for name, value in part.items()}
    for own in ("compile_cache_dir", "log_level", "max_num_queued_reqs", "max_num_queued_tokens"):
        values.pop(own)
    return values


# --- host 0 ---------------------------------------------------------------------------------------------------


class Followers:
    """Host 0's connections to the others.

    Args:
        hosts: all.
        config: what they must have been told, too.
    """

    def __init__(self, hosts: Hosts, config: EngineConfig) -> None:
        self._hosts = hosts
        self._config = comparable(config)
        self._channels: dict[int, HostChannel] = {}
        self._infos: dict[int, str] = {}
        self._changed = threading.Condition()

    def gather(self) -> None:
        """Wait until all are there.

        Raises:
            ConfigError: the port cannot be used, or not all of them came.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        port = self._hosts.port + 1
        try:
            # On all addresses, as JAX's own service: the one that others know need not be this host's own.
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            server = socket.create_server(
                ("", port), family=family, dualstack_ipv6=dual, backlog=self._hosts.count
            )
        except OSError as error:
            raise ConfigError(
                f"Host 0 cannot listen on port {port} (the coordinator's and one more): {error.strerror or error}.",
                param="coordinator",
            ) from None
        with server:
            while len(self._channels) < self._hosts.count - 1:
                missing = [rank for rank in range(1, self._hosts.count) if rank not in self._channels]
                logger.info("Waiting for %d of %d hosts: %s", len(missing), self._hosts.count, missing)
                server.settimeout(max(0.1, deadline - time.monotonic()))
                try:
                    sock, (address, *_) = server.accept()
                except TimeoutError:
                    raise ConfigError(
                        f"Hosts {missing} did not join within {JOIN_SECONDS:g} s.", param="nnodes"
                    ) from None
                self._admit(sock, address.removeprefix("::ffff:"))
        for rank, channel in self._channels.items():
            channel.send(Welcome())
            channel.listen(self._listener(rank), end_engine)

    def _admit(self, sock: socket.socket, address: str) -> None:
        """Take in a host, or hang up on whoever else it is.

        Raises:
            ConfigError: it is a host, and does not fit.
        """
        channel = HostChannel(sock, ToLeader, address)
        try:
            sock.settimeout(HELLO_SECONDS)
            hello = channel.receive()
            sock.settimeout(None)
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("A connection from %s is no host of this engine: %s", address, error)
            channel.close()
            return
        reason = self._why_not(hello)
        if reason is None:
            channel.name = f"Host {hello.rank} ({address})"
            self._channels[hello.rank] = channel
            return
        with contextlib.suppress(OSError):
            channel.send(Refused(reason))
        channel.close()
        raise ConfigError(f"A host at {address} does not fit: {reason}", param="nnodes")

    def _why_not(self, hello: Any) -> str | None:
        if not isinstance(hello, Hello):
            return "it does not say who it is."
        if hello.version != __version__:
            return f"it has version {hello.version}, and host 0 has {__version__}."
        if not 0 < hello.rank < self._hosts.count:
            return f"its node_rank is {hello.rank}, and there are {self._hosts.count} hosts."
        if hello.rank in self._channels:
            return f"there is a host with node_rank {hello.rank} already."
        differing = [name for name, value in self._config.items() if hello.config.get(name) != value]
        if differing:
            name = differing[0]
            return f"{name} is {hello.config.get(name)} there and {self._config[name]} on host 0."
        return None

    def _listener(self, rank: int) -> Callable[[Any], None]:
        def on_message(message: Any) -> None:
            if isinstance(message, Failed):
                end_engine(f"{self._channels[rank].name} failed: {message.message}")
            elif isinstance(message, Ready):
                with self._changed:
                    self._infos[rank] = message.info
                    self._changed.notify_all()

        return on_message

    def send(self, message: msgspec.Struct) -> None:
        """To all; a host that cannot be reached ends the engine."""
        for channel in self._channels.values():
            try:
                channel.send(message)
            except OSError as error:
                end_engine(f"{channel.name} is gone: {error}.")

    def wait_ready(self, info: RunnerInfo) -> None:
        """Wait until all have initialized their runners; each death is told elsewhere.

        Raises:
            EngineDeadError: one is not like host 0.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._infos) == len(self._channels))
        for rank, text in self._infos.items():
            if text != repr(info):
                raise EngineDeadError(
                    f"{self._channels[rank].name} is not like host 0: it has {text}, not {info!r}."
                )

    def close(self) -> None:
        """Tell all to end, and leave."""
        for channel in self._channels.values():
            channel.expect_end()
            with contextlib.suppress(OSError):
                channel.send(Close())

    def disconnect(self) -> None:
        """End the connections."""
        for channel in self._channels.values():
            channel.close()


class LeaderRunner:
    """Host 0's runner: what it is told, the other hosts are told first. The protocol is ModelRunner's.

    Args:
        runner: this host's own.
        followers: all there.
    """

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers
        self._ready = self._closed = False

    def initialize(self) -> RunnerInfo:
        self._followers.send(Initialize())
        info = self._runner.initialize()
        self._followers.wait_ready(info)
        self._ready = True
        return info

    def execute(self, scheduler_output: SchedulerOutput) -> PendingStep:
        self._followers.send(execute_message(scheduler_output))
        return _LeaderStep(self._runner.execute(scheduler_output), self._followers)

    def recover(self) -> None:
        # The others may wait for a part of the step that this host never ran, and would not come to read a Close.
        self._ready = False
        self._followers.disconnect()
        raise EngineDeadError(
            "A step failed, and an engine over several hosts ends with it: restart all of them."
        )

    def num_compilations(self) -> int:
        return self._runner.num_compilations()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._ready:
            self._followers.close()
        else:
            self._followers.disconnect()  # no good end: they end with 1, too
        self._runner.close()
        if self._ready:
            leave()
            self._followers.disconnect()


class _LeaderStep:
    """A step on all hosts."""

    def __init__(self, step: PendingStep, followers: Followers) -> None:
        self._step = step
        self._followers = followers

    def result(self) -> ModelRunnerOutput:
        self._followers.send(Read())
        return self._step.result()


# --- all hosts ------------------------------------------------------------------------------------------------


def join(hosts: Hosts) -> None:
    """Join the JAX program of all hosts; before anything looks for devices."""
    logger.info("Joining as host %d of %d at %s", hosts.rank, hosts.count, hosts.coordinator)
    importlib.import_module("sharding.distributed").initialize(hosts.coordinator, hosts.count, hosts.rank)


def leave() -> bool:
    """Leave it, when all do. A host that does not must not keep this one: False after a while."""
    thread = threading.Thread(target=importlib.import_module("sharding.distributed").shutdown, daemon=True)
    thread.start()
    thread.join(END_SECONDS)
    return not thread.is_alive()


def end_engine(reason: str) -> NoReturn:
    """End this process at once: its main thread may wait for a collective that will never end."""
    logger.error("%s The engine ends on all hosts; restart all of them.", reason)
    logging.shutdown()
    os._exit(1)

"""Several hosts: who they are, who may join, and that followers make host 0's calls in its order."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from server_process import free_port

from jaxserve.config import EngineConfig, HostsConfig
from jaxserve.engine import follower as follower_module
from jaxserve.engine import host_channel, hosts
from jaxserve.engine.follower import follow
from jaxserve.engine.hosts import Followers, Hosts, LeaderRunner, find_hosts
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import ModelRunnerOutput, NewRequestData, RunnerInfo, SchedulerOutput


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"coordinator": "a:1"}, "belong together"),
        ({"node_rank": 0, "nnodes": 2}, "belong together"),
        ({"coordinator": "a:1", "node_rank": 0}, "belong together"),
        ({"coordinator": "a", "node_rank": 0, "nnodes": 2}, "HOST:PORT"),
        ({"coordinator": "a:65535", "node_rank": 0, "nnodes": 2}, "HOST:PORT"),
        ({"coordinator": "a:1", "node_rank": 2, "nnodes": 2}, "0 to 1"),
        ({"nnodes": 0}, "at least 1"),
    ],
)
def test_flags_that_name_no_hosts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HostsConfig(**fields)


def test_hosts_are_those_of_the_flags_else_of_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_pod_of_metadata", lambda: None)
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    assert find_hosts(HostsConfig()) is None
    with pytest.raises(ConfigError, match="--coordinator"):
        find_hosts(HostsConfig(nnodes=2))
    named = HostsConfig(coordinator="[::1]:77", nnodes=3, node_rank=2)
    assert find_hosts(named) == Hosts("::1", 77, 3, 2)
    assert Hosts("::1", 77, 3, 2).coordinator == "[::1]:77"
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0,t-1,t-2,t-3")
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    assert find_hosts(HostsConfig()) == Hosts("t-0", hosts.DEFAULT_PORT, 4, 3)
    assert find_hosts(named) == Hosts("::1", 77, 3, 2)
    assert find_hosts(HostsConfig(nnodes=1)) is None
    with pytest.raises(ConfigError, match="4 hosts"):
        find_hosts(HostsConfig(nnodes=2))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert find_hosts(HostsConfig()) is None


def test_a_tpu_vm_asks_its_metadata_server(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"worker-network-endpoints": "w:0:10.0.0.2,w:1:10.0.0.3", "agent-worker-number": "1"}
    monkeypatch.setattr(hosts, "_metadata", answers.__getitem__)
    monkeypatch.setattr(hosts.Path, "exists", lambda path: True)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    assert hosts._pod_of_metadata() == Hosts("10.0.0.2", hosts.DEFAULT_PORT, 2, 1)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    assert hosts._pod_of_metadata() is None


class Ended(BaseException):
    """Stands for the process's end."""


class RecordingRunner:
    """Notes its calls, and what it was given, in order."""

    def __init__(self, info: RunnerInfo, fail_at: int = -1) -> None:
        self.info = info
        self.calls: list[Any] = []
        self.fail_at = fail_at

    def initialize(self) -> RunnerInfo:
        self.calls.append("initialize")
        return self.info

    def execute(self, step: SchedulerOutput) -> RecordingRunner:
        if step.step_id == self.fail_at:
            raise RuntimeError("out of luck")
        masks = {request_id: mask.words().tolist() for request_id, mask in step.token_masks.items()}
        step.token_masks = {}
        self.calls.append((step, masks))
        return self

    def result(self) -> ModelRunnerOutput:
        self.calls.append("result")
        return ModelRunnerOutput(0)

    def recover(self) -> None:
        self.calls.append("recover")

    def num_compilations(self) -> int:
        return 0

    def close(self) -> None:
        self.calls.append("close")


def info(num_blocks: int = 10) -> RunnerInfo:
    return RunnerInfo(num_blocks, 8, 64, 32, [], 0, 1, "cpu")


class Team:
    """Host 0 in this thread and one follower in another, over a real connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runner: RecordingRunner, **others: Any) -> None:
        self.runner = runner
        self.ends: list[str] = []
        self.ended = threading.Event()
        self.result: Any = None
        port = free_port(2)
        self.hosts = Hosts("127.0.0.1", port, 2, 0)
        config = EngineConfig.from_kwargs(max_num_seqs=4)
        theirs = EngineConfig.from_kwargs(**{"max_num_seqs": 4, **others})

        def end(reason: str) -> None:
            self.ends.append(reason)
            self.ended.set()
            if threading.current_thread() is self.thread:
                raise Ended

        monkeypatch.setattr(hosts, "end_engine", end)
        monkeypatch.setattr(follower_module, "end_engine", end)
        monkeypatch.setattr(follower_module, "join", lambda _: None)
        monkeypatch.setattr(follower_module.signal, "signal", lambda *_: None)
        for module in (hosts, follower_module):
            monkeypatch.setattr(module, "leave", lambda: True)
        monkeypatch.setattr(follower_module, "create_runner", lambda config: (runner, config))
        self.followers = Followers(self.hosts, config)
        self.thread = threading.Thread(
            target=self._follow, args=(theirs, Hosts("127.0.0.1", port, 2, 1)), daemon=True
        )
        self.thread.start()

    def _follow(self, config: EngineConfig, where: Hosts) -> None:
        try:
            self.result = follow(config, where)
        except BaseException as error:
            self.result = error

    def wait(self) -> Any:
        self.thread.join(60)
        return self.result


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Team]:
    return lambda *given, **others: Team(monkeypatch, *given, **others)


class Mask:
    def words(self) -> np.ndarray:
        return np.array([5, -1], np.int32)


def step(step_id: int, *, masked: bool = False) -> SchedulerOutput:
    request = NewRequestData(
        "r", [1, 2], 2, SamplingParams(temperature=0.5), 7, [1], [[3]], [[1, 2]], 0, data_rank=1
    )
    return SchedulerOutput(
        step_id, [request], num_scheduled_tokens={"r": 2}, samples={"r"}, num_decode_rows_by_rank=(0, 0),
        token_masks={"r": Mask()} if masked else {},
    )  # fmt: skip


def test_a_follower_makes_the_same_calls_in_the_same_order(team: Callable[..., Team]) -> None:
    theirs, ours = RecordingRunner(info()), RecordingRunner(info())
    pair = team(theirs)
    pair.followers.gather()
    leader = LeaderRunner(ours, pair.followers)
    assert leader.initialize() == info()
    first = leader.execute(step(1))
    second = leader.execute(step(2, masked=True))
    first.result()
    second.result()
    leader.close()
    leader.close()
    assert pair.wait() == 0
    assert theirs.calls == ours.calls
    assert ours.calls == ["initialize", (step(1), {}), (step(2), {"r": [5, -1]}), "result", "result", "close"]
    assert pair.ends == []
    with pytest.raises(EngineDeadError, match="restart"):
        leader.recover()


def test_a_stranger_at_the_port_does_not_end_the_start(
    team: Callable[..., Team], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = follower_module._connect

    def after_strangers(config: EngineConfig, where: Hosts) -> host_channel.HostChannel:
        for greeting in (b"", b"\x04\x00\x00\x00GET "):
            while True:
                try:
                    with socket.create_connection((where.address, where.port + 1), timeout=60) as stranger:
                        stranger.sendall(greeting)
                        break
                except ConnectionRefusedError:  # host 0 does not listen yet
                    time.sleep(0.01)
        return connect(config, where)

    monkeypatch.setattr(follower_module, "_connect", after_strangers)
    pair = team(RecordingRunner(info()))
    pair.followers.gather()
    leader = LeaderRunner(RecordingRunner(info()), pair.followers)
    assert leader.initialize() == info()
    leader.close()
    assert pair.wait() == 0


def test_a_host_that_differs_is_refused_by_name(team: Callable[..., Team]) -> None:
    pair = team(RecordingRunner(info()), max_num_seqs=8)
    with pytest.raises(ConfigError, match="max_num_seqs is 8 there and 4 on host 0"):
        pair.followers.gather()
    assert isinstance(pair.wait(), ConfigError)
    assert "max_num_seqs" in str(pair.result)


def test_settings_of_one_host_alone_may_differ() -> None:
    """A core's own process has no limits of the queue: its front process has them."""
    own = {
        "log_level": "debug",
        "compile_cache_dir": "/c",
        "max_num_queued_reqs": 3,
        "max_num_queued_tokens": 9,
    }
    assert hosts.comparable(EngineConfig.from_kwargs(**own)) == hosts.comparable(EngineConfig())


def test_a_host_with_other_devices_ends_the_start(team: Callable[..., Team]) -> None:
    pair = team(RecordingRunner(info(num_blocks=9)))
    pair.followers.gather()
    leader = LeaderRunner(RecordingRunner(info()), pair.followers)
    with pytest.raises(EngineDeadError, match="not like host 0"):
        leader.initialize()
    leader.close()
    assert pair.ended.wait(60)
    assert "Host 0" in pair.ends[0]


def test_a_step_that_fails_on_host_0_ends_the_followers(team: Callable[..., Team]) -> None:
    pair = team(RecordingRunner(info()))
    pair.followers.gather()
    leader = LeaderRunner(RecordingRunner(info()), pair.followers)
    leader.initialize()
    leader.execute(step(1))
    with pytest.raises(EngineDeadError, match="restart"):
        leader.recover()
    assert pair.ended.wait(60)
    leader.close()
    assert len(pair.ends) == 1
    assert "Host 0" in pair.ends[0]


def test_a_step_that_fails_on_a_follower_ends_host_0_too(team: Callable[..., Team]) -> None:
    pair = team(RecordingRunner(info(), fail_at=2))
    pair.followers.gather()
    leader = LeaderRunner(RecordingRunner(info()), pair.followers)
    leader.initialize()
    leader.execute(step(1))
    leader.execute(step(2))
    assert isinstance(pair.wait(), Ended)
    assert pair.ended.wait(60)
    assert any("out of luck" in reason and "Host 1" in reason for reason in pair.ends)
    pair.followers.disconnect()


def test_a_host_that_falls_silent_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_channel, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(host_channel, "DEATH_SECONDS", 1.0)
    deaths: list[str] = []
    died = threading.Event()

    def on_death(reason: str) -> None:
        deaths.append(reason)
        died.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        channel = host_channel.HostChannel(
            socket.create_connection(server.getsockname()[:2]), hosts.ToLeader, "Host 7"
        )
        silent, _ = server.accept()
        with silent:
            channel.listen(lambda _: None, on_death)
            assert died.wait(30)
            assert "Host 7 has not been heard of" in deaths[0]
            channel.close()
    assert len(deaths) == 1

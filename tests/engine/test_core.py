"""EngineCore with a fake runner: the order of dispatches and reads, and steps that fail."""

from __future__ import annotations

import pytest
from fake_runner import FakePendingStep, FakeRunner

from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import EngineCoreOutput, EngineCoreRequest, SchedulerOutput


class Runner(FakeRunner):
    """Fails as a device does: the whole step, and with it everything on the device."""

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.fail_dispatch_at = self.fail_result_at = -1
        self.events: list[tuple[str, int]] = []
        self.num_recoveries = 0

    def execute(self, scheduler_output: SchedulerOutput) -> FakePendingStep:
        number = len([e for e in self.events if e[0] == "dispatch"])
        self.events.append(("dispatch", number))
        if number == self.fail_dispatch_at:
            raise RuntimeError("the host tripped")
        pending = super().execute(scheduler_output)
        read = pending.result

        def result():
            self.events.append(("read", number))
            if number == self.fail_result_at:
                raise RuntimeError("the device tripped")
            return read()

        pending.result = result  # type: ignore[method-assign]
        return pending

    def recover(self) -> None:
        self.num_recoveries += 1
        self.rows.clear()
        self.unread.clear()

    def _update_batch(self, step: SchedulerOutput) -> None:
        # After a recovery the scheduler still says which requests left.
        step.finished_request_ids = [i for i in step.finished_request_ids if i in self.rows]
        super()._update_batch(step)


def make_core(async_scheduling: bool = True, **arguments) -> EngineCore:
    config = EngineConfig.from_kwargs(
        max_num_seqs=4, max_num_batched_tokens=32, async_scheduling=async_scheduling
    ).with_defaults_for("cpu")
    return EngineCore(config, Runner(max_num_seqs=4, max_num_batched_tokens=32, **arguments))


def request(request_id: str, num_tokens: int = 5, max_tokens: int = 6) -> EngineCoreRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return EngineCoreRequest(request_id, list(range(1, num_tokens + 1)), params, 0.0, 0, [], [])


def run(core: EngineCore, limit: int = 500) -> dict[str, list[EngineCoreOutput]]:
    results: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(limit):
        if not core.has_work():
            return results
        for output in core.step().outputs:
            results.setdefault(output.request_id, []).append(output)
    raise AssertionError("the core does not come to an end")


def test_two_steps_are_in_flight():
    core = make_core()
    core.add_request(request("a"))
    run(core)
    events = core.runner.events
    assert events[:4] == [("dispatch", 0), ("dispatch", 1), ("read", 0), ("dispatch", 2)]


def test_without_async_scheduling_each_step_is_read_at_once():
    core = make_core(async_scheduling=False)
    core.add_request(request("a"))
    run(core)
    assert core.runner.events[:4] == [("dispatch", 0), ("read", 0), ("dispatch", 1), ("read", 1)]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_tokens_are_the_same_either_way(async_scheduling):
    tokens = {}
    for flag in (async_scheduling, True):
        core = make_core(flag)
        for i in range(9):
            core.add_request(request(f"r{i}", 3 + 7 * i, 5))
        tokens[flag] = {k: [t for o in v for t in o.new_token_ids] for k, v in run(core).items()}
    assert len(set(map(str, tokens.values()))) == 1


@pytest.mark.parametrize("where", ["fail_dispatch_at", "fail_result_at"])
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_failed_step_fails_its_requests_and_no_others(where, async_scheduling, number):
    core = make_core(async_scheduling)
    setattr(core.runner, where, number)
    for i in range(9):  # four run, five wait
        core.add_request(request(f"r{i}"))
    results = run(core)
    assert sorted(results) == sorted(f"r{i}" for i in range(9)), "every request ends"
    failed = [i for i, outputs in results.items() if outputs[-1].error]
    served = [i for i, outputs in results.items() if outputs[-1].finish_reason == "length"]
    assert len(failed) + len(served) == 9
    assert 1 <= len(failed) <= 4
    assert core.runner.num_recoveries == 1
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks - 1
    core.add_request(request("after"))
    assert run(core)["after"][-1].finish_reason == "length"


def test_ranks_of_one_engine():
    """Sizes are sums, a prompt must fit one rank, and a failed step fails the requests of all ranks."""
    core = make_core(data_parallel_size=2, num_blocks=9, block_size=4)
    assert (core.info.num_blocks, core.info.kv_cache_tokens, core.info.max_prompt_tokens) == (18, 64, 32)
    with pytest.raises(InvalidRequestError, match="too small"):
        core.add_request(request("long", num_tokens=33))
    core.runner.fail_result_at = 1
    for i in range(11):
        core.add_request(request(f"r{i}", num_tokens=4, max_tokens=3))
    assert core.step().stats.num_running == 8
    results = run(core)
    assert sorted(i for i, outputs in results.items() if outputs[-1].error) == [f"r{i}" for i in range(8)]
    assert all(results[f"r{i}"][-1].finish_reason == "length" for i in (8, 9, 10))
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks - 2


def test_error_messages_hold_no_internals():
    core = make_core()
    core.runner.fail_result_at = 0
    core.add_request(request("a"))
    (output,) = run(core)["a"]
    assert "tripped" not in output.error


def test_abort_with_steps_in_flight():
    core = make_core()
    for i in range(4):
        core.add_request(request(f"r{i}", max_tokens=50))
    for _ in range(3):
        core.step()
    core.abort(["r1", "r2", "unknown"])
    results = run(core)
    assert {i for i, outputs in results.items() if outputs[-1].finish_reason} == {"r0", "r3"}
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks - 1

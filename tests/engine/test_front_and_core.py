"""AsyncEngine and a core in its own process, with a fake device: limits of the queue, many choices, exact counters."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_stack import ROOT, SUPPORT, FakeCoreClient
from live_server import until
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.front import Front
from jaxserve.errors import QueueFullError
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.metrics.snapshot import Counter, Gauge, Histogram
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import RepetitionDetection, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.anyio

ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 2048, "load_format": "dummy"}
RUNNER = {"num_blocks": 3000, "step_seconds": 0.002, "max_model_len": 2048}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
async def make_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SUPPORT}")
    engines: list[AsyncEngine] = []

    def make(runner: dict[str, Any] | None = None, **options: Any) -> AsyncEngine:
        monkeypatch.setenv("FAKE_RUNNER", json.dumps({**RUNNER, **(runner or {})}))
        config = EngineConfig.from_kwargs(model=str(model), **{**ENGINE, **options})
        client = FakeCoreClient()
        client.start(config)
        engines.append(AsyncEngine(config, client, Front.load(config.model_config), client.wait_ready()))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def params(**given: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 4, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY, **given}
    )


async def answer(engine: AsyncEngine, prompt: Any = "ab", **given: Any) -> RequestOutput:
    last = None
    async for output in engine.generate(prompt, params(**given)):
        last = output
    assert last is not None
    return last


# --- limits of the queue ---------------------------------------------------------------------------------


async def test_so_many_requests_may_wait(make_engine):
    engine = make_engine(max_num_seqs=1, max_num_queued_reqs=2, runner={"step_seconds": 0.05})
    running = await engine.add_request("a", params(max_tokens=200))
    while engine.stats.num_running == 0:
        await asyncio.sleep(0.005)
    waiting = [await engine.add_request("b", params()) for _ in range(2)]
    with pytest.raises(QueueFullError, match="max_num_queued_reqs is 2") as caught:
        await engine.add_request("c", params())
    assert caught.value.reason == "queue_full"
    for stream in (running, *waiting):
        await stream.aclose()
    assert (await answer(engine)).finished


async def test_the_choices_of_a_request_count_each(make_engine):
    engine = make_engine(max_num_seqs=1, max_num_queued_reqs=4, runner={"step_seconds": 0.05})
    running = await engine.add_request("a", params(max_tokens=200))
    while engine.stats.num_running == 0:
        await asyncio.sleep(0.005)
    one = await engine.add_request("b", params())
    with pytest.raises(QueueFullError):
        await engine.add_request("c", params(n=4))
    for stream in (running, one):
        await stream.aclose()


async def test_a_request_that_finds_nothing_waiting_is_never_refused(make_engine):
    engine = make_engine(max_num_queued_reqs=1, max_num_queued_tokens=3)
    assert len((await answer(engine, [5] * 100, n=20)).outputs) == 20


async def test_so_many_tokens_may_wait(make_engine):
    engine = make_engine(max_num_queued_tokens=100, runner={"step_seconds": 0.05})
    first = await engine.add_request([5] * 90, params())
    with pytest.raises(QueueFullError, match="max_num_queued_tokens is 100") as caught:
        await engine.add_request([6] * 11, params())
    assert caught.value.reason == "queued_tokens"
    second = await engine.add_request([6] * 10, params())
    await asyncio.gather(*(read(stream) for stream in (first, second)))
    assert (await answer(engine, [7] * 100)).finished, "nothing waits any more"


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


# --- many choices ----------------------------------------------------------------------------------------


async def test_a_prompts_many_choices_do_not_delay_others(make_engine):
    engine = make_engine(max_num_seqs=64, max_num_batched_tokens=512, runner={"step_seconds": 0.0})
    await answer(engine)
    began = time.monotonic()
    many = await engine.add_request([5] * 1000, params(n=4096, max_tokens=1))
    other = await engine.add_request("ab", params())
    gaps, last = 0.0, time.monotonic()
    reading = asyncio.ensure_future(read(other))
    for _ in range(50):
        await asyncio.sleep(0.01)
        gaps, last = max(gaps, time.monotonic() - last), time.monotonic()
    await many.aclose()
    await asyncio.wait_for(reading, 30)
    assert gaps < 1.0, "the event loop went on"
    assert time.monotonic() - began < 30
    assert engine._outputs.num_unfinished_completions == 0


async def test_choices_that_are_aborted_before_they_were_admitted(make_engine):
    engine = make_engine(max_num_seqs=8, runner={"step_seconds": 0.01})
    stream = await engine.add_request("ab", params(n=2000, max_tokens=50))
    await stream.aclose()
    assert (await answer(engine)).finished
    await until(lambda: (engine.stats.num_running, engine.stats.num_waiting) == (0, 0))


async def test_only_the_first_choice_scores_the_prompt(make_engine):
    engine = make_engine()
    output = await answer(engine, [5, 6, 7, 8], n=3, prompt_logprobs=1, seed=9)
    assert len(output.prompt_logprobs or ()) == 4
    assert len(output.outputs) == 3


async def test_repetition_ends_a_request(make_engine):
    """The fake device says the alphabet over and over."""
    engine = make_engine()
    detection = RepetitionDetection(max_pattern_size=30, min_count=3)
    output = await answer(engine, max_tokens=500, repetition_detection=detection)
    assert output.outputs[0].finish_reason == "repetition"
    assert len(output.outputs[0].token_ids) == 3 * 26


async def test_truncation_sides(make_engine):
    engine = make_engine()
    for side, expected in (("left", [3, 4]), ("right", [1, 2]), (None, [3, 4])):
        output = await answer(engine, [1, 2, 3, 4], truncate_prompt_tokens=2, truncation_side=side)
        assert output.prompt_token_ids == expected


# --- counters --------------------------------------------------------------------------------------------


async def test_counters_are_exact_after_aborts(make_engine):
    engine = make_engine()
    metrics = EngineMetrics("m", 2048)
    engine.attach_metrics(metrics)
    rng = random.Random(5)
    received = {"tokens": 0, "prompts": 0}
    ends: dict[str, int] = {}

    async def client(index: int) -> None:
        n = rng.choice([1, 1, 3])
        stream = await engine.add_request(
            [5] * rng.randint(1, 60),
            params(n=n, max_tokens=rng.randint(1, 40), output_kind=RequestOutputKind.CUMULATIVE),
        )
        last: RequestOutput | None = None
        leave_after = rng.randint(0, 30) if index % 2 else 1000
        async for output in stream:
            last = output
            if sum(len(choice.token_ids) for choice in output.outputs) >= leave_after:
                break
        await stream.aclose()
        async for output in stream:
            last = output  # what came until it was aborted
        if last is not None:
            received["tokens"] += sum(len(choice.token_ids) for choice in last.outputs)
            received["prompts"] += len(last.prompt_token_ids)
            reason = "abort" if any(choice.finish_reason == "abort" for choice in last.outputs) else "length"
            ends[reason] = ends.get(reason, 0) + 1

    await asyncio.gather(*(client(index) for index in range(60)))
    await until(lambda: (engine.stats.num_running, engine.stats.num_waiting) == (0, 0))
    values = {
        (
            metric.name,
            *(
                value
                for name, value in metric.labels.items()
                if name in ("reason", "finished_reason", "source", "num_tokens")
            ),
        ): metric
        for metric in metrics.snapshot()
    }

    def value(*key: str) -> float:
        metric = values[key]
        assert isinstance(metric, Counter | Gauge)
        return metric.value

    success = {
        reason: value("jaxserve:request_success", reason) for reason in ("abort", "length", "stop", "error")
    }
    assert sum(success.values()) == 60
    assert success["stop"] == success["error"] == 0
    assert success["abort"] > 5
    assert success["length"] >= 30
    assert value("jaxserve:generation_tokens") == received["tokens"]
    assert value("jaxserve:prompt_tokens") == received["prompts"]
    by_source = [
        value("jaxserve:prompt_tokens_by_source", source) for source in ("local_compute", "local_cache_hit")
    ]
    assert sum(by_source) == received["prompts"]
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(f"jaxserve:{gauge}") == 0
    computed = sum(int(key[1]) * value(*key) for key in values if key[0] == "jaxserve:steps")
    steps = values[("jaxserve:iteration_tokens_total",)]
    assert isinstance(steps, Histogram)
    assert 0 < value("jaxserve:padding_tokens") == computed - steps.sum
    for name in ("step_host_seconds", "step_device_seconds", "e2e_request_latency_seconds"):
        histogram = values[(f"jaxserve:{name}",)]
        assert isinstance(histogram, Histogram)
        assert histogram.count > 0
        assert 0 < histogram.sum < 60
        assert histogram.buckets["+Inf"] == histogram.count

"""AsyncEngine: the core in its own process, on a tiny model. Concurrency, aborts, and the death of the core."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENGINE

from jaxserve import LLM, AsyncEngine, RequestOutputKind, SamplingParams
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
)

pytestmark = pytest.mark.device

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def engine(tiny_model):
    engine = AsyncEngine.from_kwargs(str(tiny_model), **ENGINE)
    yield engine
    engine.shutdown()


async def collect(engine: AsyncEngine, prompt, params=GREEDY) -> list[int]:
    ids: list[int] = []
    async for output in engine.generate(prompt, params):
        ids = output.outputs[0].token_ids
    return ids


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_concurrent_requests_get_what_they_get_alone(tiny_model, make_llm):
    rng = random.Random(3)
    prompts = [[rng.randrange(8, 320) for _ in range(rng.randrange(1, 60))] for _ in range(64)]
    expected = [o.outputs[0].token_ids for o in make_llm().generate(prompts, GREEDY, use_tqdm=False)]

    async def serve(engine: AsyncEngine, concurrency: int) -> list[list[int]]:
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt):
            async with gate:
                return await collect(engine, prompt)

        return await asyncio.gather(*map(one, prompts))

    async def main(engine: AsyncEngine) -> None:
        for concurrency in (1, 16, 64):
            assert await serve(engine, concurrency) == expected, concurrency

    engine = AsyncEngine.from_kwargs(str(tiny_model), **ENGINE)
    try:
        asyncio.run(main(engine))
        assert engine.stats.num_compilations == 0
    finally:
        engine.shutdown()


def test_deltas_add_up(engine):
    async def main():
        whole = await collect(engine, "one two three")
        parts: list[int] = []
        params = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate("one two three", params):
            parts += output.outputs[0].token_ids
        assert parts == whole

    asyncio.run(main())


def test_aborted_requests_end_and_give_their_blocks_back(engine):
    long = GREEDY.clone(max_tokens=200)

    async def main():
        streams = [await engine.add_request([9] * 20, long, request_id=f"r{i}") for i in range(200)]
        await anext(aiter(streams[0]))
        await engine.abort([f"r{i}" for i in range(0, 200, 2)])
        for i in range(1, 200, 2):
            await streams[i].aclose()
        last = [output async for output in streams[2]]
        assert last[-1].outputs[0].finish_reason == "abort"
        assert await collect(engine, [5, 6]) == await collect(engine, [5, 6])
        stats = engine.stats
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks - 1

    asyncio.run(main())


def test_bad_requests_are_refused_before_they_are_admitted(engine):
    async def main():
        with pytest.raises(InvalidRequestError):
            await engine.add_request([], GREEDY)
        with pytest.raises(InvalidRequestError, match="in use"):
            await engine.add_request([1], GREEDY.clone(max_tokens=100), request_id="twin")
            await engine.add_request([1], GREEDY, request_id="twin")
        await engine.abort("twin")
        assert len(await collect(engine, [5])) == 10

    asyncio.run(main())


def test_a_full_queue_refuses(tiny_model):
    engine = AsyncEngine.from_kwargs(str(tiny_model), **ENGINE, max_num_queued_reqs=3)

    async def main():
        with pytest.raises(QueueFullError, match="max_num_queued_reqs"):
            for _ in range(20):
                await engine.add_request([5] * 9, GREEDY.clone(max_tokens=300))

    try:
        asyncio.run(main())
    finally:
        engine.shutdown()


def test_killing_the_core_fails_its_requests(engine):
    async def main():
        stream = await engine.add_request([7] * 9, GREEDY.clone(max_tokens=480))
        await anext(aiter(stream))
        os.kill(engine.core_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="signal 9"):
            async for _ in stream:
                pass
        assert engine.errored is not None
        with pytest.raises(EngineDeadError):
            await engine.add_request([7], GREEDY)

    asyncio.run(main())


def test_shutdown_leaves_no_process(engine):
    pid = engine.core_pid
    engine.shutdown()
    assert not process_exists(pid)


def test_the_core_ends_with_its_parent(tiny_model, tmp_path):
    script = f"""
import os, signal
from jaxserve import AsyncEngine
engine = AsyncEngine.from_kwargs({str(tiny_model)!r}, **{ENGINE!r})
print(engine.core_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env, timeout=120)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while process_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_exists(pid)


@pytest.mark.parametrize(
    "arguments,error",
    [
        ({"model": "/nowhere/at/all"}, ModelNotFoundError),
        ({"max_model_len": 10**7}, ConfigError),
    ],
)
def test_a_core_that_cannot_start_says_why(tiny_model, arguments, error):
    with pytest.raises(error):
        AsyncEngine.from_kwargs(**{"model": str(tiny_model), **ENGINE, **arguments})


def test_llm_and_async_engine_agree_on_the_defaults(engine):
    with LLM(engine._config.model_config.model, **ENGINE) as llm:
        assert engine.default_sampling_params() == llm._front.default_sampling_params

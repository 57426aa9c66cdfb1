"""LLM's surface with a fake device: enqueue and wait, metrics, tools in chat, priorities, a core that breaks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_core_process import letters
from fake_runner import FakeRunner
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM, BeamSearchParams, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine import llm as llm_module
from jaxserve.engine.core import EngineCore
from jaxserve.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from jaxserve.metrics.snapshot import Counter, Gauge, Histogram

QUIET = {"use_tqdm": False}


def fake_core(config: EngineConfig) -> EngineCore:
    runner = FakeRunner(num_blocks=400, vocab_size=320, sampler=letters)
    return EngineCore(config.with_defaults_for("cpu"), runner)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture
def make(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    monkeypatch.setattr(llm_module, "create_core", fake_core)
    built: list[LLM] = []

    def make(**options: Any) -> LLM:
        built.append(LLM(str(model), max_num_seqs=8, max_num_batched_tokens=64, **options))
        return built[-1]

    yield make
    for llm in built:
        llm.close()


def params(max_tokens: int = 4, **given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **given)


def test_enqueued_prompts_run_when_they_are_waited_for(make):
    llm = make()
    first = llm.enqueue("a", params(3))
    more = llm.enqueue(["b", [5, 6], {"prompt": "c"}], [params(5), params(1), params(2)])
    assert len({*first, *more}) == 4
    outputs = llm.wait_for_completion(**QUIET)
    assert [output.request_id for output in outputs] == first + more
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5, 1, 2]
    assert llm.wait_for_completion(**QUIET) == []


def test_generate_meanwhile_does_not_take_what_was_enqueued(make):
    llm = make()
    llm.enqueue(["a", "b"], params(2))
    (output,) = llm.generate("c", params(30), **QUIET)
    assert len(output.outputs[0].token_ids) == 30
    llm.enqueue("d", params(40))
    assert [len(o.outputs[0].token_ids) for o in llm.wait_for_completion(**QUIET)] == [2, 2, 40]


def test_a_wrong_prompt_enqueues_nothing(make):
    llm = make()
    with pytest.raises(InvalidRequestError):
        llm.enqueue(["a", [10**6]], params())
    assert llm.wait_for_completion(**QUIET) == []


def test_a_failure_is_raised_where_it_is_waited_for(make):
    llm = make()
    (bad,) = llm.enqueue("a", params(20))
    good = llm.enqueue("b", params(3))
    llm._core.runner.failures[bad] = "it tripped"
    (output,) = llm.generate("c", params(50), **QUIET)
    assert output.finished
    with pytest.raises(RequestFailedError, match="it tripped"):
        llm.wait_for_completion(**QUIET)
    assert good
    assert len(llm.generate("d", params(2), **QUIET)) == 1
    assert llm._core.scheduler.stats().num_running == 0


def test_a_core_that_breaks_its_own_state_is_dead(make, monkeypatch):
    llm = make()
    llm.enqueue("a", params(5))

    def broken(*_: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(llm._core.scheduler, "update_from_output", broken)
    for _ in range(3):
        with pytest.raises(EngineDeadError, match="Build a new LLM"):
            llm.generate("b", params(), **QUIET)
    with pytest.raises(EngineDeadError):
        llm.wait_for_completion(**QUIET)


def test_metrics(make):
    llm = make()
    llm.generate(["a", "b"], params(6), **QUIET)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    tokens, running = metrics["jaxserve:generation_tokens"], metrics["jaxserve:num_requests_running"]
    latency = metrics["jaxserve:e2e_request_latency_seconds"]
    assert isinstance(tokens, Counter)
    assert isinstance(running, Gauge)
    assert isinstance(latency, Histogram)
    assert (tokens.value, running.value, latency.count) == (12, 0, 2)
    assert set(tokens.labels) == {"model_name", "engine"}


def test_defaults_of_the_model_and_of_the_engine(make):
    llm = make(override_generation_config={"temperature": 0.3, "max_new_tokens": 7})
    assert llm.get_default_sampling_params().temperature == 0.3
    assert len(llm.generate("a", **QUIET)[0].outputs[0].token_ids) == 7


def test_reset_prefix_cache(make):
    llm = make()
    prompt = list(range(5, 85))
    cached = [llm.generate(prompt, params(), **QUIET)[0].num_cached_tokens for _ in range(2)]
    llm.reset_prefix_cache()
    cached.append(llm.generate(prompt, params(), **QUIET)[0].num_cached_tokens)
    assert cached == [0, 64, 0]


def test_tools_and_template_variables_reach_the_template(make):
    llm = make()
    template = "{{ tools[0].function.name }} {{ mood }} {{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    (output,) = llm.chat(
        [{"role": "user", "content": "hi"}], params(1),
        chat_template=template, tools=tools, chat_template_kwargs={"mood": "good"}, **QUIET,
    )  # fmt: skip
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(output.prompt_token_ids) == "weather good hi"


def test_several_conversations_with_parameters_and_priorities(make):
    llm = make(scheduling_policy="priority")
    conversations = [[{"role": "user", "content": text}] for text in "abc"]
    outputs = llm.chat(conversations, [params(1), params(2), params(3)], priority=[3, 1, 2], **QUIET)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequestError):
        llm.chat(conversations, params(), priority=[1], **QUIET)


def test_beam_search_takes_every_form_of_prompt(make):
    llm = make()
    outputs = llm.beam_search(["ab", [5, 6], {"prompt": "c"}], BeamSearchParams(2, 3))
    assert [len(output.sequences) for output in outputs] == [2, 2, 2]
    assert llm.beam_search([], BeamSearchParams(2, 3)) == []


def test_a_closed_llm_takes_nothing(make):
    llm = make()
    llm.close()
    for call in (
        lambda: llm.enqueue("a"),
        llm.wait_for_completion,
        lambda: llm.beam_search("a", BeamSearchParams(1, 1)),
    ):
        with pytest.raises(EngineDeadError):
            call()


def test_no_full_collection_falls_into_a_run(make, monkeypatch):
    """They take tenths of a second over all that tracing made; what falls due comes afterwards."""
    llm, before, during = make(), gc.get_threshold(), set[int]()
    step = llm._core.step
    monkeypatch.setattr(llm._core, "step", lambda: during.add(gc.get_threshold()[2]) or step())
    llm.generate(["a", "b"], params(3), **QUIET)
    assert min(during) > 1e6
    assert gc.get_threshold() == before
    llm.enqueue("c", params(2))
    monkeypatch.setattr(llm._core, "step", lambda: 1 / 0)
    with pytest.raises(EngineDeadError):
        llm.wait_for_completion(**QUIET)
    assert gc.get_threshold() == before

"""Constrained generation through the whole engine, on a tiny model with random weights: at temperature 1 it writes
anything that its grammar allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_cases import all_cases
from tiny_checkpoints import EOS_TOKEN_ID, write_tiny_checkpoint

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.outputs import RequestOutput
from jaxserve.reasoning_params import ReasoningParams

pytestmark = pytest.mark.device

ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8, "num_gpu_blocks_override": 200}
"""As the engine's own tests have it: the same programs."""
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["first_name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("structured") / "llama")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **ENGINE) as llm:
        yield llm
        assert_nothing_left(llm)


def assert_nothing_left(llm: LLM) -> None:
    stats = llm._core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert stats.num_compilations == 0


def params(constraint: StructuredOutputsParams | None = None, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1, "seed": 3, "max_tokens": 120, "structured_outputs": constraint, **fields}
    )


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def generate(llm: LLM, *sampling: SamplingParams, prompt: Any = "The answer: ") -> list[RequestOutput]:
    return llm.generate([prompt] * len(sampling), list(sampling), use_tqdm=False)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


# --- every kind ---------------------------------------------------------------------------------------------------


def run_cases(llm: LLM, cases: list[Any], seeds: range) -> float:
    """Check all completed outputs; the share that was completed."""
    asked = [(case, seed) for case in cases for seed in seeds]
    # Random weights seldom end a string: the closing quote and bracket get a push.
    push = {llm.get_tokenizer().encode(text)[0]: 4.0 for text in '"}]'}
    outputs = generate(
        llm, *[params(case[1], seed=seed, max_tokens=300, logit_bias=push) for case, seed in asked]
    )
    complete = 0
    for (case, seed), output in zip(asked, outputs):
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            complete += 1
            assert case[2](completion.text), (case[0], seed, completion.text)
    return complete / len(asked)


def test_outputs_are_in_the_language(llm: LLM):
    assert run_cases(llm, all_cases(), range(1)) > 0.8


@pytest.mark.slow
def test_all_outputs_are_in_the_language(llm: LLM):
    assert run_cases(llm, all_cases(), range(1, 12)) > 0.85


def test_structural_tags(llm: LLM):
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags", "triggers": ["<f="], "at_least_one": True, "stop_after_first": True,
            "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}],
        },
    }  # fmt: skip
    push = {llm.get_tokenizer().encode(text)[0]: 8.0 for text in '<f="'}
    constraint = StructuredOutputsParams(structural_tag=tag)
    outputs = generate(
        llm, *[params(constraint, seed=seed, max_tokens=400, logit_bias=push) for seed in range(6)]
    )
    found = [re.search(r"<f=(.*?)</f>", output.outputs[0].text, re.DOTALL) for output in outputs]
    assert any(found)
    for match in filter(None, found):
        assert match[1].startswith("a>")
        assert set(json.loads(match[1][2:])) == {"first_name", "age"}


# --- beside other parameters -----------------------------------------------------------------------------------------


def test_jumping_ahead_changes_no_text(llm: LLM):
    """Log probabilities are had for every token, so with them nothing is jumped over."""
    constraint = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    jumped = generate(llm, *[params(constraint, seed=seed, temperature=0.01) for seed in range(4)])
    forced = '{"first_name":"'
    for output in jumped:
        assert output.outputs[0].text.startswith(forced)
    single = StructuredOutputsParams(choice=["exactly one possible answer"])
    plain, stepped = generate(llm, params(single), params(single, logprobs=1))
    assert plain.outputs[0].text == stepped.outputs[0].text == "exactly one possible answer"
    completion = stepped.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.token_ids[-1] == plain.outputs[0].token_ids[-1] == EOS_TOKEN_ID
    assert completion.stop_reason is None


def test_logprobs_are_the_models_own(llm: LLM):
    """As in vLLM: of the logits before any mask, so the chosen token need not be among the most likely."""
    (output,) = generate(llm, params(regex("[xyz]{6}"), logprobs=3))
    completion = output.outputs[0]
    assert all(len(entry) in (3, 4) for entry in completion.logprobs)
    assert any(next(iter(entry.values())).rank > 3 for entry in completion.logprobs)


def test_a_seed_gives_the_same_output_in_any_company(llm: LLM):
    constraint = StructuredOutputsParams(json=PERSON)
    alone = texts([generate(llm, params(constraint, seed=seed))[0] for seed in range(6)])
    together = texts(generate(llm, *[params(constraint, seed=seed) for seed in range(6)]))
    assert together == alone
    assert len(set(alone)) > 3


def test_n_completions_walk_by_themselves(llm: LLM):
    (output,) = generate(llm, params(regex("[a-z]{5}-[0-9]{3}"), n=5))
    found = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{5}-[0-9]{3}", text) for text in found)
    assert len(set(found)) == 5


def test_penalties_see_appended_tokens(llm: LLM):
    """The appended x counts as much as a sampled one: the next choice is the other letter."""
    for penalty in ({"presence_penalty": 2.0}, {"repetition_penalty": 1e6}):
        bias = {llm.get_tokenizer().encode(letter)[0]: 100.0 for letter in "xy"}
        free = params(regex("[ab]-x-x-[xy]"), temperature=0, logit_bias=bias)
        (plain,) = generate(llm, free)
        jumped, stepped = generate(llm, free.clone(**penalty), free.clone(**penalty, logprobs=0))
        assert jumped.outputs[0].text == stepped.outputs[0].text
        assert plain.outputs[0].text[:-1] == jumped.outputs[0].text[:-1]


def test_allowed_token_ids_narrow_a_grammar(llm: LLM):
    tokenizer = llm.get_tokenizer()
    allowed = [tokenizer.encode(text)[0] for text in "ab-"] + [EOS_TOKEN_ID]
    (output,) = generate(llm, params(regex("[a-z]{4}-[a-z]{4}"), allowed_token_ids=allowed))
    assert re.fullmatch("[ab]{4}-[ab]{4}", output.outputs[0].text)


def test_a_contradiction_is_the_requests_own_mistake(llm: LLM):
    allowed = llm.get_tokenizer().encode("a")
    with pytest.raises(InvalidRequestError, match="no token is left") as caught:
        generate(llm, params(regex("aab"), allowed_token_ids=allowed))
    assert caught.value.param == "allowed_token_ids"
    assert texts(generate(llm, params(regex("ok")))) == ["ok"]


def test_bad_words_give_way_to_the_grammar(llm: LLM):
    (narrowed, bound) = generate(
        llm, params(regex("[ab]{6}"), bad_words=["a"]), params(regex("aaa"), bad_words=["a"])
    )
    assert narrowed.outputs[0].text == "bbbbbb"
    assert bound.outputs[0].text == "aaa"


def test_min_tokens_and_ignore_eos(llm: LLM):
    longer, ended = generate(
        llm, params(regex("[ab]{1,40}"), min_tokens=30), params(regex("[ab]{0,20}"), ignore_eos=True)
    )
    assert len(longer.outputs[0].text) >= 29
    assert len(ended.outputs[0].text) == 20
    assert ended.outputs[0].finish_reason == "stop"


def test_stop_strings_cut_what_was_appended(llm: LLM):
    jumped, stepped = generate(
        llm,
        params(regex("[ab]-one-two-three"), stop=["two"]),
        params(regex("[ab]-one-two-three"), stop=["two"], logprobs=0),
    )
    for output in (jumped, stepped):
        assert output.outputs[0].text[1:] == "-one-"
        assert output.outputs[0].stop_reason == "two"
    assert jumped.outputs[0].token_ids == stepped.outputs[0].token_ids


def test_max_tokens_ends_an_output_early(llm: LLM):
    (output,) = generate(llm, params(StructuredOutputsParams(json=PERSON), max_tokens=7))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 7


# --- in company -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 16, pytest.param(64, marks=pytest.mark.slow)])
def test_free_requests_do_not_notice_constrained_ones(llm: LLM, concurrency):
    free = [params(seed=index, max_tokens=24, ignore_eos=True) for index in range(concurrency)]
    alone = [output.outputs[0].token_ids for output in generate(llm, *free)]
    constraints = [
        StructuredOutputsParams(json=PERSON),
        regex("[a-f]{3,20}"),
        StructuredOutputsParams(choice=["a", "bc"]),
    ]
    mixed = [
        request
        for pair in zip(free, (params(constraints[i % 3], seed=i) for i in range(concurrency)))
        for request in pair
    ]
    outputs = generate(llm, *mixed)
    assert [output.outputs[0].token_ids for output in outputs[::2]] == alone
    for index, output in enumerate(outputs[1::2]):
        if index % 3 and output.outputs[0].finish_reason == "stop":
            assert re.fullmatch("[a-f]{3,20}|a|bc", output.outputs[0].text)
    assert_nothing_left(llm)


@pytest.mark.parametrize(
    "arguments", [{"num_gpu_blocks_override": 24, "max_model_len": 100}, {"async_scheduling": False}]
)
def test_same_answer_under_every_batching(model: Path, llm: LLM, arguments):
    requests = [params(StructuredOutputsParams(json=PERSON), seed=seed, max_tokens=60) for seed in range(12)]
    expected = [output.outputs[0].token_ids for output in generate(llm, *requests)]
    with LLM(str(model), **{**ENGINE, **arguments}) as other:
        assert [output.outputs[0].token_ids for output in generate(other, *requests)] == expected
        if "num_gpu_blocks_override" in arguments:
            assert other._core.scheduler.stats().num_preemptions > 0
        assert_nothing_left(other)


def test_a_broken_grammar_is_refused_before_anything_runs(llm: LLM):
    with pytest.raises(InvalidRequestError) as caught:
        generate(
            llm,
            params(),
            params(StructuredOutputsParams(json={"type": "integer", "minimum": 5, "maximum": 3})),
        )
    assert caught.value.param == "structured_outputs.json"
    assert_nothing_left(llm)


def test_without_a_tokenizer_it_is_refused(model: Path):
    with (
        LLM(str(model), **ENGINE, skip_tokenizer_init=True) as bare,
        pytest.raises(UnsupportedError, match="skip_tokenizer_init"),
    ):
        generate(bare, params(regex("a")), prompt=[5, 6])


def test_reasoning_is_free_and_ends_with_its_budget(llm: LLM):
    """Requests with and without a grammar, in one batch with free ones."""
    end = 77
    asked = [
        params(regex("[a-c]{4}") if budget % 2 else None, reasoning=ReasoningParams(end_token_ids=[end], budget=budget),
               seed=budget, max_tokens=30, ignore_eos=True)
        for budget in (0, 1, 2, 5, 8)
    ]  # fmt: skip
    outputs = llm.generate([[5, 6, 7]] * 6, [*asked, params(seed=9, max_tokens=30)])
    for request, output in zip(asked, outputs):
        token_ids = output.outputs[0].token_ids
        at = token_ids.index(end)
        assert at <= request.reasoning.budget
        if request.structured_outputs is not None:
            answer = llm.get_tokenizer().decode(token_ids[at + 1 :])
            assert re.fullmatch("[a-c]{4}", answer), answer

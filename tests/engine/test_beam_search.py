"""Beam search finds what transformers finds: stored for every machine, computed anew where torch is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from beam_cases import CASES, BeamCase, transformers_beams
from conftest import ENGINE
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM, BeamSearchParams
from jaxserve.engine.beam_search import BeamSearch
from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import Logprob, PositionLogprobs

pytestmark = pytest.mark.device

FIXTURE = Path(__file__).parents[1] / "fixtures" / "parity" / "tiny_beams.json"


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm()


def search(llm: LLM, case: BeamCase) -> dict[str, Any]:
    """In the form of ``transformers_beams``."""
    inputs = llm._inputs
    before = inputs.eos_token_ids
    inputs.eos_token_ids = list(case.eos) if case.eos is not None else before
    params = BeamSearchParams(case.num_beams, case.max_tokens, length_penalty=case.length_penalty)
    try:
        (output,) = llm.beam_search(list(case.prompt), params)
    finally:
        inputs.eos_token_ids = before
    ids = [sequence.tokens[len(case.prompt) :] for sequence in output.sequences]
    scores = [
        sequence.cum_logprob / (len(tokens) ** case.length_penalty)
        for sequence, tokens in zip(output.sequences, ids)
    ]
    return {"ids": ids, "scores": scores if case.num_beams > 1 else None}


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["ids"] == expected["ids"]
    if expected["scores"] is not None:
        assert found["scores"] == pytest.approx(expected["scores"], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_stored(llm: LLM, index: int):
    compare(search(llm, CASES[index]), json.loads(FIXTURE.read_text())["llama"][index])


def test_the_fixture_has_early_ends_and_late_ones():
    stored = json.loads(FIXTURE.read_text())
    lengths = [
        (len(ids), case.max_tokens)
        for found in stored.values()
        for case, beams in zip(CASES, found, strict=True)
        for ids in beams["ids"]
    ]
    early = sum(length < limit for length, limit in lengths)
    assert min(early, len(lengths) - early) > 20, lengths


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.exhaustive)])
def test_live(family: str, tmp_path: Path):
    """Against transformers itself where torch is installed, else against what it found before."""
    folder = write_tiny_checkpoint(tmp_path / family, family)
    stored = json.loads(FIXTURE.read_text())[family]
    live = importlib.util.find_spec("torch") is not None
    with LLM(str(folder), **ENGINE) as llm:
        for case, expected in zip(CASES, stored, strict=True):
            compare(search(llm, case), transformers_beams(folder, case) if live else expected)


def test_texts_and_log_probabilities(llm: LLM):
    params = BeamSearchParams(3, 4)
    one, two = llm.beam_search(["ab", {"prompt": "xyz"}], params)
    assert len(one.sequences) == len(two.sequences) == 3
    for sequence in one.sequences:
        assert sequence.text is not None
        assert sequence.text.startswith("ab")
        chosen = [next(iter(position.values())).logprob for position in sequence.logprobs]
        assert sum(chosen) == pytest.approx(sequence.cum_logprob)
        assert sequence.tokens[-len(chosen) :] == [next(iter(position)) for position in sequence.logprobs]
    scores = [sequence.cum_logprob for sequence in two.sequences]
    assert scores == sorted(scores, reverse=True)


def test_a_width_that_needs_more_log_probabilities_is_refused(llm: LLM):
    with pytest.raises(InvalidRequestError, match="--max-logprobs 22"):
        llm.beam_search("ab", BeamSearchParams(11, 4))


def test_the_context_ends_the_search(llm: LLM):
    prompt = [5] * (llm._core.info.max_model_len - 3)
    (output,) = llm.beam_search([prompt], BeamSearchParams(2, 50, ignore_eos=True))
    assert {len(sequence.tokens) for sequence in output.sequences} == {llm._core.info.max_model_len}
    assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 101}, "length_penalty"),
    ],
)
def test_wrong_parameters(wrong: dict[str, Any], param: str):
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})
    assert caught.value.param == param


# --- by hand ---------------------------------------------------------------------------------------------


def position(**logprobs: float) -> PositionLogprobs:
    return {int(name[1:]): Logprob(value, rank) for rank, (name, value) in enumerate(logprobs.items(), 1)}


def test_an_end_outside_of_the_best_does_not_count():
    """Two beams; the end token (9) is third of four candidates."""
    search = BeamSearch([1], BeamSearchParams(2, 10), [9], 100)
    search.advance([position(_2=-0.1, _3=-2.0, _9=-3.0, _4=-4.0)])
    assert not search.best()
    assert search.prompts() == [[1, 2], [1, 3]]


def test_an_end_among_the_best_counts_and_a_spare_goes_on():
    search = BeamSearch([1], BeamSearchParams(2, 10, length_penalty=0.0), [9], 100)
    search.advance([position(_2=-0.1, _9=-0.2, _3=-3.0, _4=-4.0)])
    assert [beam.token_ids for beam in search.best()] == [[9]]
    assert search.prompts() == [[1, 2], [1, 3]]
    assert not search.finished


def test_it_ends_when_nothing_can_get_better():
    search = BeamSearch([1], BeamSearchParams(1, 10, length_penalty=0.0), [9], 100)
    search.advance([position(_9=-0.2, _2=-0.3)])
    assert search.finished
    assert search.best()[0].finish_reason == "stop"


def test_ignoring_the_end():
    search = BeamSearch([1], BeamSearchParams(1, 2, ignore_eos=True), [9], 100)
    search.advance([position(_9=-0.2, _2=-0.3)])
    search.advance([position(_9=-0.2, _2=-0.3)])
    assert [beam.token_ids for beam in search.best()] == [[9, 9]]
    assert search.best()[0].finish_reason == "length"

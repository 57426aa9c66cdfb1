"""Reasoning is free, ends when its budget is used up, and the grammar begins with the answer."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from scheduler_harness import EOS, VOCAB_SIZE, Harness, Result

from jaxserve.reasoning_params import ReasoningParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import FinishReason
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.llguidance_backend import LLGuidanceBackend
from jaxserve.structured_output.reasoning_gate import ReasoningGate, constraint_of
from jaxserve.structured_output.request_grammar import MaskFiller
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.structured_outputs_params import StructuredOutputsParams

FIRST, LETTERS = 5, "abcdefghij"
TOKENS = [b""] * FIRST + [letter.encode() for letter in LETTERS]
TOKENS += [b""] * (VOCAB_SIZE - len(TOKENS))
A, B, C = FIRST, FIRST + 1, FIRST + 2
START, END = 37, 38
ABC = StructuredOutputsParams(regex="abc")


def encode(text: str) -> list[int]:
    return [TOKENS.index(letter.encode()) for letter in text]


@pytest.fixture(scope="module")
def compiler():
    backend = LLGuidanceBackend(Vocabulary(TOKENS, [EOS, START, END], [EOS], None, encode))
    compiler = GrammarCompiler(lambda: backend)
    yield compiler
    compiler.close()


def run(compiler: GrammarCompiler, depth: int = 0, **params: object) -> Result:
    harness = Harness(depth=depth, compiler=compiler)
    harness.add("r", [7, 8, 9], **{"max_tokens": 40, **params})
    while harness.scheduler.has_unfinished():
        if not harness.step().num_scheduled_tokens and not harness.in_flight:
            harness.scheduler.wait_for_grammar(0.01)
    harness.run()
    return harness.results["r"]


def allowed(words: np.ndarray) -> set[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


class Walk:
    """A gate that is walked by hand."""

    def __init__(self, compiler: GrammarCompiler, reasoning: ReasoningParams, grammar=ABC) -> None:
        gate = constraint_of(
            compiler, SamplingParams(structured_outputs=grammar, reasoning=reasoning), VOCAB_SIZE
        )
        assert isinstance(gate, ReasoningGate)
        self.gate = gate
        if grammar is not None:
            gate.future.result(20)
        assert gate.ready
        gate.start()
        self._filler = MaskFiller(compiler)

    def allowed(self) -> set[int]:
        self._filler.start([self.gate])
        return allowed(self.gate.words())


EVERYTHING = set(range(VOCAB_SIZE))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_budget_ends_the_reasoning_and_then_the_grammar_holds(compiler, depth: int, budget: int):
    reasoning = ReasoningParams(end_token_ids=[END], budget=budget)
    result = run(
        compiler, depth, structured_outputs=ABC, reasoning=reasoning, stop_token_ids=None, ignore_eos=True
    )
    end = result.token_ids.index(END)
    assert end <= budget
    assert result.token_ids[end + 1 :] == [A, B, C, EOS]
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [0, 1])
def test_a_budget_needs_no_grammar(compiler, depth: int):
    free = run(compiler, depth, ignore_eos=True)
    result = run(compiler, depth, reasoning=ReasoningParams(end_token_ids=[END], budget=6), ignore_eos=True)
    assert result.token_ids[:6] == free.token_ids[:6]
    assert result.token_ids[6] == END
    assert len(result.token_ids) == 40


def test_without_budget_and_grammar_nothing_is_constrained(compiler):
    params = SamplingParams(reasoning=ReasoningParams(end_token_ids=[END]))
    assert constraint_of(compiler, params, VOCAB_SIZE) is None


def test_what_is_begun_is_free_until_it_ends(compiler):
    walk = Walk(compiler, ReasoningParams(end_token_ids=[END]))
    for token in (A, START, 30):
        assert walk.allowed() >= EVERYTHING
        assert walk.gate.accept(token) == []
    walk.gate.accept(END)
    assert walk.allowed() == {A}
    assert walk.gate.accept(A) == [B, C, EOS]
    assert walk.gate.ended


def test_the_first_token_decides(compiler):
    reasoning = ReasoningParams(start_token_id=START, end_token_ids=[END])
    walk = Walk(compiler, reasoning)
    assert walk.allowed() == {A, START}
    assert walk.gate.accept(A)[:2] == [B, C]
    walk = Walk(compiler, reasoning)
    assert walk.allowed() == {A, START}
    walk.gate.accept(START)
    assert walk.allowed() >= EVERYTHING
    walk.gate.accept(END)
    assert walk.allowed() == {A}


def test_an_end_of_several_tokens(compiler):
    walk = Walk(compiler, ReasoningParams(end_token_ids=[END, 42, 43], budget=4))
    for token in (END, 42, 9, END):
        assert walk.allowed() >= EVERYTHING
        walk.gate.accept(token)
    for token in (END, 42, 43):
        assert walk.allowed() == {token}
        walk.gate.accept(token)
    assert walk.allowed() == {A}


def test_a_gate_without_grammar_is_done_at_once(compiler):
    walk = Walk(compiler, ReasoningParams(end_token_ids=[END], budget=1), grammar=None)
    assert isinstance(walk.gate.future, Future)
    assert walk.gate.future.done()
    walk.gate.accept(A)
    assert walk.allowed() == {END}
    walk.gate.accept(END)
    assert walk.allowed() >= EVERYTHING
    assert walk.gate.accept(EOS) == []

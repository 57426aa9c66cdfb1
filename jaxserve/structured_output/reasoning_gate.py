"""ReasoningGate: leaves a request's reasoning free, ends it when its budget is used up, and then applies its grammar.

To the scheduler and the runner it is the request's grammar.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Literal

import numpy as np

from jaxserve.reasoning_params import ReasoningParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.interface import CompiledGrammar, Matcher
from jaxserve.structured_output.request_grammar import RequestGrammar

Phase = Literal["either", "reasoning", "answer"]


def constraint_of(
    compiler: GrammarCompiler, params: SamplingParams, vocab_size: int
) -> RequestGrammar | None:
    """What constrains a request's tokens; None if nothing that must follow its output does."""
    grammar = None if params.structured_outputs is None else RequestGrammar(compiler, params)
    reasoning = params.reasoning
    if reasoning is None or (grammar is None and reasoning.budget is None):
        return grammar
    return ReasoningGate(reasoning, grammar, vocab_size)


class ReasoningGate(RequestGrammar):
    """A grammar that begins with the answer.

    Args:
        reasoning: where the reasoning begins and ends.
        grammar: of the answer; None leaves it free.
        vocab_size: the model's.
    """

    def __init__(self, reasoning: ReasoningParams, grammar: RequestGrammar | None, vocab_size: int) -> None:
        # The base class compiles a grammar; this one has that of another.
        self._reasoning = reasoning
        self._grammar = grammar
        self._phase: Phase = "reasoning" if reasoning.start_token_id is None else "either"
        self._num_tokens = 0
        """Tokens of reasoning."""
        self._last: deque[int] = deque(maxlen=len(reasoning.end_token_ids))
        self._to_force = list(reasoning.end_token_ids)
        self._num_words = -(-vocab_size // 32)
        self.future: Future[CompiledGrammar] = Future() if grammar is None else grammar.future
        if grammar is None:
            self.future.cancel()  # done, without a result that anybody would ask for
        self.ended = False

    @property
    def ready(self) -> bool:
        return self._grammar is None or self._grammar.ready

    def start(self) -> None:
        if self._grammar is not None:
            self._grammar.start()

    def accept(self, token_id: int) -> list[int]:
        if self._phase == "either":
            if token_id == self._reasoning.start_token_id:
                self._phase = "reasoning"
                return []
            self._phase = "answer"
        if self._phase == "reasoning":
            self._reason(token_id)
            return []
        if self._grammar is None:
            return []
        forced = self._grammar.accept(token_id)
        self.ended = self._grammar.ended
        return forced

    def _reason(self, token_id: int) -> None:
        if self._is_over:
            self._to_force.pop(0)
        self._num_tokens += 1
        self._last.append(token_id)
        if list(self._last) == self._reasoning.end_token_ids:
            self._phase = "answer"

    @property
    def _is_over(self) -> bool:
        """Whether the budget is used up: the end is all that may follow."""
        budget = self._reasoning.budget
        return budget is not None and self._num_tokens >= budget

    @property
    def matcher(self) -> Matcher:
        assert self._grammar is not None
        return self._grammar.matcher

    @property
    def has_mask(self) -> bool:
        return self._grammar is None or self._phase == "reasoning" or self._grammar.has_mask

    def set_mask(self, masks: Future[np.ndarray], index: int) -> None:
        if self._grammar is not None:
            self._grammar.set_mask(masks, index)

    def words(self) -> np.ndarray:
        if self._phase == "reasoning" and self._is_over:
            return _only(self._to_force[0], self._num_words)
        if self._phase == "reasoning" or self._grammar is None:
            return np.full(self._num_words, -1, np.int32)
        words = self._grammar.words()
        if self._phase == "either" and self._reasoning.start_token_id is not None:
            words = words | _only(self._reasoning.start_token_id, len(words))
        return words


def _only(token_id: int, num_words: int) -> np.ndarray:
    words = np.zeros(num_words, np.uint32)
    words[token_id // 32] = np.uint32(1) << np.uint32(token_id % 32)
    return words.view(np.int32)

"""LLGuidanceBackend: grammars by llguidance (an Earley parser over a lexer of regex derivatives, in Rust).

Its calls release the interpreter lock. It raises nothing: a matcher goes into an error state, read here after each
call that may bring it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance import TokenizerWrapper as Wrapper

from jaxserve.structured_output.grammar_text import grammar_text
from jaxserve.structured_output.interface import GrammarError, Matcher
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.structured_outputs_params import StructuredOutputsParams

MAX_MESSAGE = 300
PARALLEL_ROWS = 4
"""From this many rows on, masks are filled by several threads: handing out the work costs some 20 us."""


class LLGuidanceBackend:
    """Implements ``GrammarBackend``.

    Args:
        vocabulary: the tokens.
        num_threads: that fill masks; None is most of the machine's cores.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = _make_tokenizer(vocabulary)
        self._executor = LLExecutor(num_threads)
        self._special = [
            vocabulary.tokens[i].decode("utf-8", "replace") for i in vocabulary.special_token_ids
        ]

    @property
    def eos_token_ids(self) -> Sequence[int]:
        return self._vocabulary.eos_token_ids

    @property
    def num_words(self) -> int:
        return -(-len(self._vocabulary.tokens) // 32)

    def compile(self, params: StructuredOutputsParams) -> LLGuidanceGrammar:
        """Compile, and see that something can be generated.

        The calling thread needs a large stack (``compiler.STACK_BYTES``): long chains of references recurse.
        """
        try:
            text = grammar_text(params, self._special)
        except ValueError as error:
            raise GrammarError(f"cannot be read: {_shown(str(error))}") from None
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_limits())
        _check(matcher)
        mask = np.zeros((1, self.num_words), np.int32)
        _fill(matcher, mask[0])
        _check(matcher)
        if not mask.any() and not matcher.is_accepting():
            raise GrammarError("is impossible: no output matches it.")
        return LLGuidanceGrammar(matcher)

    def fill_masks(self, matchers: Sequence[Matcher], masks: np.ndarray) -> None:
        rows = [cast(LLGuidanceMatcher, matcher).inner for matcher in matchers]
        if len(rows) < PARALLEL_ROWS:
            for inner, mask in zip(rows, masks):
                _fill(inner, mask)
        else:
            targets = [(inner, index) for index, inner in enumerate(rows)]
            num_rows, num_words = masks.shape
            self._executor.unsafe_compute_mask_ptr(targets, masks.ctypes.data, num_words * 4, num_rows)


class LLGuidanceGrammar:
    """Implements ``CompiledGrammar``: a matcher that is copied and never moved."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy())


class LLGuidanceMatcher:
    """Implements ``Matcher``."""

    __slots__ = ("inner",)

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    def accept(self, token_id: int) -> None:
        if not self.inner.consume_token(token_id):
            _check(self.inner)
            raise GrammarError(f"does not allow the token {token_id} that was sampled.")

    def forced_tokens(self) -> list[int]:
        return self.inner.compute_ff_tokens()

    @property
    def ended(self) -> bool:
        return self.inner.is_stopped() and not self.inner.is_error()


def _make_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    greedy: list[LLTokenizer] = []

    class Source:
        """What llguidance asks a tokenizer for."""

        eos_token_id = vocabulary.eos_token_ids[0]
        bos_token_id = vocabulary.bos_token_id
        tokens = vocabulary.tokens
        special_token_ids = vocabulary.special_token_ids

        def __call__(self, text: str | bytes) -> list[int]:
            text = text.decode() if isinstance(text, bytes) else text
            return vocabulary.encode(text) or (greedy[0].greedy_tokenize(text) if greedy else [])

    source: Any = Source()
    tokenizer = LLTokenizer(
        Wrapper(source), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_ids
    )
    greedy.append(tokenizer)
    return tokenizer


def _limits() -> LLParserLimits:
    # What one grammar, and one request that walks through it, may take: the expressions of a hostile regular expression
    # 50 MB, a state one to two kilobytes. Ordinary grammars need a tenth. Verbose errors would hold the user's text.
    return LLParserLimits(initial_lexer_fuel=300_000, max_lexer_states=16_000, verbose_errors=False)


def _fill(matcher: LLMatcher, mask: np.ndarray) -> None:
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(f"cannot be used: {_shown(matcher.get_error())}")


def _shown(message: str) -> str:
    message = " ".join(message.split())
    return message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"

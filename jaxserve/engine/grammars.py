"""Where an engine's grammars come from: the tokenizer's vocabulary and a backend, both made when first needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.errors import UnsupportedError
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.interface import GrammarBackend
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.tokenizer.interface import Tokenizer

TokenizerAndEnds = Callable[[], tuple[Tokenizer | None, Sequence[int]]]
"""Gives the tokenizer (None if there is none) and the ids that end a sequence."""


def grammar_compiler(load_tokenizer: TokenizerAndEnds, vocab_size: Callable[[], int]) -> GrammarCompiler:
    """A compiler over the model's vocabulary.

    Args:
        load_tokenizer: called once, in a thread, with the first constrained request.
        vocab_size: rows of the model's embedding.
    """

    def load() -> GrammarBackend:
        from jaxserve.structured_output.llguidance_backend import LLGuidanceBackend

        tokenizer, eos_token_ids = load_tokenizer()
        if tokenizer is None:
            raise UnsupportedError(
                "structured_outputs needs a tokenizer, but this engine was started without one (skip_tokenizer_init).",
                param="structured_outputs",
            )
        return LLGuidanceBackend(Vocabulary.of(tokenizer, vocab_size(), eos_token_ids))

    return GrammarCompiler(load)

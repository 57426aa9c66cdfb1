"""What a grammar backend is: it compiles a constraint, walks a request through it, and fills token masks.

A backend is one file that implements ``GrammarBackend``. Everything here may be called from any thread, but one
``Matcher`` by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.structured_outputs_params import StructuredOutputsParams


class GrammarError(Exception):
    """The user's grammar is wrong, impossible, or too complex; the message says how."""


class Matcher(Protocol):
    """Where one request's output stands in its grammar."""

    def accept(self, token_id: int) -> None:
        """Go on by one token of the output.

        Raises:
            GrammarError: the grammar does not allow it, or grew too complex.
        """
        ...

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as far as there is only one way on; empty where there is a choice.

        They are not accepted yet. The end-of-sequence token is never among them.
        """
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing but the end-of-sequence token may follow, as far as that is known without a mask."""
        ...


class CompiledGrammar(Protocol):
    """A grammar that any number of requests may walk through."""

    def start(self) -> Matcher:
        """A matcher at the beginning."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars over one tokenizer's vocabulary."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """The tokens that masks allow where the output may end."""
        ...

    @property
    def num_words(self) -> int:
        """W: int32 words of a mask."""
        ...

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile a constraint; may take long, so call it off the step loop.

        Raises:
            GrammarError: it is wrong or impossible.
        """
        ...

    def fill_masks(self, matchers: Sequence[Matcher], masks: np.ndarray) -> None:
        """Write which tokens may come next: bit v % 32 of word v // 32 is 1 where token v is allowed.

        Args:
            matchers: one a row.
            masks: int32[len(matchers), W], contiguous; overwritten.
        """
        ...

"""Random walks through a grammar: what a model with random weights would write, without the model."""

from __future__ import annotations

import random

import numpy as np

from jaxserve.structured_output.interface import CompiledGrammar, GrammarBackend


def allowed_tokens(words: np.ndarray) -> np.ndarray:
    """The ids that a mask allows."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def walk(
    backend: GrammarBackend,
    grammar: CompiledGrammar,
    seed: int,
    *,
    jump: bool = True,
    max_tokens: int = 600,
    short: float = 0.5,
) -> tuple[list[int], bool]:
    """Output tokens (without the end-of-sequence token), and whether the output is complete.

    Args:
        backend, grammar: compiled there.
        seed: of the walk.
        jump: append forced tokens without asking for masks.
        max_tokens: give up then.
        short: how often a token that ends something (a quote, a bracket, the output) is taken, if there is one.
    """
    rng = random.Random(seed)
    matcher, tokens = grammar.start(), []
    mask = np.zeros((1, backend.num_words), np.int32)
    ends = set(backend.eos_token_ids)
    while len(tokens) < max_tokens:
        if jump:
            for token_id in matcher.forced_tokens():
                matcher.accept(token_id)
                tokens.append(token_id)
            if matcher.ended:
                return tokens, True
        backend.fill_masks([matcher], mask)
        allowed = allowed_tokens(mask[0])
        assert len(allowed), "nothing is allowed"
        token_id = int(rng.choice(allowed))
        if rng.random() < short:
            ending = [i for i in allowed[:200].tolist() if i in ends or i in (18, 77, 109)]
            token_id = rng.choice(ending) if ending else token_id
        matcher.accept(token_id)
        if token_id in ends:
            return tokens, True
        tokens.append(token_id)
    return tokens, False

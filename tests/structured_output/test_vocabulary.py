"""Vocabularies of every decoder kind: walks through a grammar decode to texts of its language."""

from __future__ import annotations

import re

import pytest
from grammar_walk import walk
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from jaxserve.errors import UnsupportedError
from jaxserve.structured_output.llguidance_backend import LLGuidanceBackend
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.structured_outputs_params import StructuredOutputsParams
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer


def byte_level() -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("ð", "Ł"), ("Ġ", "he")]
    tokens = alphabet + [left + right for left, right in merges]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("two words", special=False, normalized=False)])
    return FastTokenizer(backend, named_tokens={"eos_token": "<|end|>"})


def sentencepiece() -> FastTokenizer:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehlo!,-0123",
        "é",
    ]
    merges = [("h", "e"), ("l", "l"), ("▁", "he"), ("▁he", "ll"), ("▁hell", "o")]
    tokens += [left + right for left, right in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return FastTokenizer(backend, named_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def backend_of(tokenizer: FastTokenizer, vocab_size: int | None = None) -> LLGuidanceBackend:
    return LLGuidanceBackend(
        Vocabulary.of(tokenizer, vocab_size or tokenizer.vocab_size, tokenizer.eos_token_ids)
    )


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize(
    "pattern", ["hello[0-9]{1,2}", " hello, é!{1,3}", "(a|b)-é😀-[abc]{2}", "😀{1,3}", "two words a?"]
)
def test_walks_decode_to_the_language(make, pattern):
    tokenizer = make()
    backend = backend_of(tokenizer, tokenizer.vocab_size + 37)  # models have more rows than tokens
    grammar = backend.compile(StructuredOutputsParams(regex=pattern))
    prompt = tokenizer.encode("a")
    for seed in range(8):
        tokens, complete = walk(backend, grammar, seed, jump=seed % 2 == 0)
        assert complete
        text = tokenizer.decode(prompt + tokens).removeprefix("a")
        assert re.fullmatch(pattern, text), repr(text)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_forced_text_takes_the_tokenizers_own_tokens(make):
    tokenizer = make()
    backend = backend_of(tokenizer)
    grammar = backend.compile(StructuredOutputsParams(regex=" hello(!|,)"))
    tokens, _ = walk(backend, grammar, 0)
    assert len(tokens) <= 4
    assert tokens[0] == tokenizer.encode(" hello" if make is byte_level else "hello")[0]


def test_a_model_with_fewer_rows_than_tokens():
    tokenizer = byte_level()
    backend = LLGuidanceBackend(Vocabulary.of(tokenizer, 258, [257]))
    assert backend.num_words == 9
    tokens, complete = walk(backend, backend.compile(StructuredOutputsParams(regex="hello!{2}")), 1)
    assert complete
    assert max(tokens) < 258


def test_spelt_out_special_tokens_are_text():
    tokenizer = byte_level()
    backend = backend_of(tokenizer)
    (end,) = tokenizer.eos_token_ids
    tokens, complete = walk(backend, backend.compile(StructuredOutputsParams(choice=["<|end|>"])), 0)
    assert complete
    assert end not in tokens
    assert tokenizer.decode(tokens) == "<|end|>"


def test_tokens_that_depend_on_their_neighbours_are_refused():
    tokens = ["[UNK]", "[SEP]", "hello", "##ly"]
    backend = Tokenizer(WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = FastTokenizer(backend, named_tokens={"eos_token": "[SEP]"})
    with pytest.raises(UnsupportedError, match="neighbours"):
        Vocabulary.of(tokenizer, 4, [1])


def test_a_model_without_an_end_is_refused():
    with pytest.raises(UnsupportedError, match="no token ends"):
        Vocabulary.of(byte_level(), 100, [])

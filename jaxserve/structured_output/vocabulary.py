"""Vocabulary: the bytes of every token, as the detokenizer writes them, for a grammar backend to search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.errors import UnsupportedError
from jaxserve.tokenizer.interface import Tokenizer
from jaxserve.tokenizer.pieces import TokenPieces, pieces_of


@dataclass(frozen=True)
class Vocabulary:
    """What a backend knows of a tokenizer.

    Args:
        tokens: bytes of each id below the model's vocabulary size; special tokens their spelling, ids that the
            tokenizer does not know nothing.
        special_token_ids: tokens that are no text: they match no literal text.
        eos_token_ids: tokens that end the output; at least one.
        bos_token_id: None if there is none.
        encode: the tokenizer's own tokens of a text.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]
    bos_token_id: int | None
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """The vocabulary of a byte-level or SentencePiece BPE tokenizer.

        Args:
            tokenizer: the model's.
            vocab_size: rows of the model's embedding.
            eos_token_ids: every id that ends a sequence.

        Raises:
            UnsupportedError: a token's bytes depend on its neighbours, or no token ends a sequence.
        """
        pieces = pieces_of(tokenizer)
        if not isinstance(pieces, TokenPieces) or pieces.kind == "window":
            raise UnsupportedError(
                "structured_outputs is not supported with this model's tokenizer: the text of its tokens depends on "
                "their neighbours.",
                param="structured_outputs",
            )
        eos = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        if not eos:
            raise UnsupportedError(
                "structured_outputs is not supported with this model: no token ends a sequence.",
                param="structured_outputs",
            )
        tokens: list[bytes] = []
        for token_id in range(vocab_size):
            piece = pieces.make(token_id, False)
            tokens.append(piece if isinstance(piece, bytes) else piece.encode())
        special = {token_id for token_id in pieces.special_token_ids if token_id < vocab_size}
        encode = _exact_encoder(tokenizer, tokens, special)
        return cls(tokens, sorted({*special, *eos}), eos, tokenizer.bos_token_id, encode)


_ANCHOR = "\x02"
"""A character that tokenizers merge with nothing: what a normalizer puts before a text comes before this."""


def _exact_encoder(
    tokenizer: Tokenizer, tokens: list[bytes], special: set[int]
) -> Callable[[str], list[int]]:
    """Text to tokens that spell exactly this text; empty where the tokenizer would write something else."""

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
        if any(token_id in special or token_id >= len(tokens) for token_id in ids):
            return []
        wanted, have = text.encode(), b""
        for start in range(len(ids), -1, -1):
            if have == wanted:
                return ids[start:]
            if start and len(have) < len(wanted):
                have = tokens[ids[start - 1]] + have
            else:
                break
        return []

    return encode

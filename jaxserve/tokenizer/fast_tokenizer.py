"""FastTokenizer: the Tokenizer of a ``tokenizers.Tokenizer``, whatever it was built from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizer.detokenizer import make_detokenizer
from jaxserve.tokenizer.pieces import TokenPieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Texts are encoded one by one: a thread pool inside the library would gain nothing, and it complains about
# forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class FastTokenizer:
    """Text to token ids and back.

    Safe to share between threads and tasks: the library's tokenizer is never changed after construction, and
    it releases the interpreter lock while it works.

    Args:
        backend: the library's tokenizer, complete with added tokens and post-processor.
        named_tokens: ``bos_token``, ``eos_token``, … as text.
        chat_templates: by name; the unnamed one is ``default``.
        eos_token_ids: ids that end a turn by the tokenizer's own account.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self._named_tokens = dict(named_tokens)
        self.chat_templates: dict[str, str] = dict(chat_templates or {})
        self.pieces = TokenPieces(backend)
        self._vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        eos = self.eos_token_id
        own = [eos] if eos is not None else []
        self.eos_token_ids: list[int] = list(dict.fromkeys([*own, *eos_token_ids]))

    @property
    def backend(self) -> Backend:
        """The library's tokenizer; do not change it."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @cached_property
    def max_token_length(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / this many tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self.pieces.special_token_ids

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return dict(self._named_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens written out in it are recognized.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, which is no character.
        """
        try:
            # The batch form releases the interpreter lock and computes no offsets; the single one does
            # neither.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            _refuse_surrogates(text)
            raise

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of ``token_ids``; ids that do not exist have none."""
        detokenizer = make_detokenizer(
            self.pieces,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        return detokenizer.update(token_ids) + detokenizer.flush()

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self.pieces.token(token_id) for token_id in token_ids]

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text holds an unpaired surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}: it is not valid Unicode.",
            param="prompt",
        ) from error

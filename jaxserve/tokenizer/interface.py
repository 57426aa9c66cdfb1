"""Tokenizer: the part of a tokenizer that jaxserve uses, whichever library or file it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Ids known to the tokenizer, added ones included (the model's vocabulary may be larger)."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    @property
    def chat_template(self) -> str | None:
        """The model's own Jinja chat template."""
        ...

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """``bos_token``, ``eos_token``, … as text, for the chat template."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str: ...

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each id (bytes still encoded); unknown ids give an empty one."""
        ...

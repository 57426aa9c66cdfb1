"""TokenMaskBuilder: which tokens one request may sample next, as packed bits for the device's token mask.

allowed_token_ids, bad_words and min_tokens all travel this way; numpy only. Bit v % 32 of word v // 32
is 1 where token v is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.sampling_params import SamplingParams


def mask_words(vocab_size: int) -> int:
    """int32 words of a packed token mask."""
    return -(-vocab_size // 32)


def pack_mask(allowed: np.ndarray) -> np.ndarray:
    """bool[V] -> int32[mask_words(V)]; bits beyond V are 0."""
    bits = np.zeros(mask_words(len(allowed)) * 32, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


def unpack_mask(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32[mask_words(V)] -> bool[V]."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)


def _without(words: np.ndarray, token_ids: Sequence[int]) -> np.ndarray:
    words = words.copy()
    ids = np.asarray(token_ids, np.int64)
    clear = ~(np.uint32(1) << (ids % 32).astype(np.uint32))
    np.bitwise_and.at(words.view(np.uint32), ids // 32, clear)  # .at: several ids may share a word
    return words


class TokenMaskBuilder:
    """The token mask of one request as its output grows.

    Single tokens of bad_words and everything outside allowed_token_ids are banned throughout; the
    tokens that end the request until ``min_tokens`` are out; the last token of a longer bad word
    whenever the output ends with the tokens before it.

    If all this would leave no token, restrictions give way until one is left: bad words first, then min_tokens.
    allowed_token_ids never does: should none of them be in the vocabulary, the mask is all zeros, and ``sample``
    answers -1 for the row.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed_token_ids: Iterable[int] | None = None,
        bad_words_token_ids: Iterable[Sequence[int]] = (),
        stop_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self.min_tokens = min_tokens
        self._stops = self._known(stop_token_ids) if min_tokens > 0 else []
        words = [tuple(word) for word in bad_words_token_ids if len(word) > 0]
        self._bad_tokens = self._known(word[0] for word in words if len(word) == 1)
        self._endings: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """Longer bad words as (all but the last token, last token), by the last token but one."""
        for word in words:
            if len(word) > 1 and self._known(word[-1:]):
                self._endings.setdefault(word[-2], []).append((word[:-1], word[-1]))
        allowed = np.ones(vocab_size, bool)
        if allowed_token_ids is not None:
            allowed[:] = False
            allowed[self._known(allowed_token_ids)] = True
        self._allowed = pack_mask(allowed)
        self._allows_all = bool(allowed.all())
        self._sent: tuple[bool, frozenset[int]] | None = None

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        bad_words_token_ids: Sequence[Sequence[int]],
    ) -> TokenMaskBuilder | None:
        """The builder for a request, or None when it restricts nothing."""
        if params.allowed_token_ids is None and not bad_words_token_ids and params.min_tokens == 0:
            return None
        return cls(
            vocab_size,
            allowed_token_ids=params.allowed_token_ids,
            bad_words_token_ids=bad_words_token_ids,
            stop_token_ids=stop_token_ids,
            min_tokens=params.min_tokens,
        )

    @property
    def depends_on_tokens(self) -> bool:
        """Whether the output's tokens matter, not only their number: the host must have read them all."""
        return bool(self._endings)

    def needs_update(self, num_output_tokens: int, output_token_ids: Sequence[int] = ()) -> bool:
        """Whether the mask for the next token is another than ``bits`` gave last (or it never gave one).

        Args:
            num_output_tokens: output tokens before the next one, those not read yet included.
            output_token_ids: the output; used only if ``depends_on_tokens``.
        """
        return self._key(num_output_tokens, output_token_ids) != self._sent

    def bits(
        self,
        num_output_tokens: int,
        output_token_ids: Sequence[int] = (),
        within: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """The mask for the next token: int32[mask_words(V)], or None if every token is allowed.

        The first arguments are those of ``needs_update``. When a request enters a row (anew or resumed), the device
        has nothing: ask, whatever ``needs_update`` says.

        Args:
            within: a grammar's mask, int32[mask_words(V)]. It never gives way, and where the grammar leaves nothing
                that is in allowed_token_ids, the mask is all zeros.
        """
        base = self._allowed if within is None else self._allowed & within
        self._sent = early, endings = self._key(num_output_tokens, output_token_ids)
        stops = self._stops if early else []
        if self._allows_all and not self._bad_tokens and not endings and not stops:
            return within
        for banned in ([*self._bad_tokens, *endings, *stops], stops):
            words = _without(base, banned)
            if words.any():
                return words
        return base.copy()

    def _key(self, num_output_tokens: int, output_token_ids: Sequence[int]) -> tuple[bool, frozenset[int]]:
        endings: frozenset[int] = frozenset()
        if self._endings and len(output_token_ids) > 0:
            candidates = self._endings.get(output_token_ids[-1], ())
            endings = frozenset(
                last for prefix, last in candidates if tuple(output_token_ids[-len(prefix) :]) == prefix
            )
        return num_output_tokens < self.min_tokens, endings

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]

"""Log probabilities in OpenAI's two forms, and vLLM's ``prompt_logprobs``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxserve.outputs import Logprob, PositionLogprobs
from jaxserve.server.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""Stands for minus infinity (a token that could not be sampled), which JSON cannot spell."""


def finite(logprob: float) -> float:
    """``logprob``, or the lowest number where it is no finite one."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], top: int, *, as_ids: bool
) -> ChatLogprobs:
    """Chat's form.

    Args:
        token_ids: the tokens of this output.
        positions: their log probabilities, in parallel.
        top: how many of the most likely tokens to list; -1 is all.
        as_ids: spell tokens as ``token_id:5``.
    """
    content: list[TokenLogprob] = []
    for token_id, position in zip(token_ids, positions):
        sampled = position[token_id]
        token = _spell(token_id, sampled, as_ids)
        alternatives = [
            TopLogprob(_spell(other, logprob, as_ids), finite(logprob.logprob), _bytes(logprob))
            for other, logprob in most_likely(position, top)
        ]
        content.append(TokenLogprob(token, finite(sampled.logprob), _bytes(sampled), alternatives))
    return ChatLogprobs(content)


class CompletionLogprobsBuilder:
    """Completions' form for one choice, output by output: offsets go on from where the last ones ended.

    Args:
        top: how many of the most likely tokens to list beside the sampled one; -1 is all.
        as_ids: spell tokens as ``token_id:5``.
        decode: the text of a token that has no logprob (the prompt's first).
    """

    def __init__(self, top: int, *, as_ids: bool, decode: Callable[[int], str]) -> None:
        self._top = top
        self._as_ids = as_ids
        self._decode = decode
        self._offset = 0

    def build(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> CompletionLogprobs:
        """The parallel lists of these tokens. A position that is None (the prompt's first) has no logprob."""
        result = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions):
            sampled = None if position is None else position[token_id]
            unscored = sampled is None and not self._as_ids
            token = self._decode(token_id) if unscored else _spell(token_id, sampled, self._as_ids)
            result.text_offset.append(self._offset)
            result.tokens.append(token)
            result.token_logprobs.append(None if sampled is None else finite(sampled.logprob))
            result.top_logprobs.append(None if position is None else self._alternatives(token_id, position))
            self._offset += len(token)
        return result

    def _alternatives(self, token_id: int, position: PositionLogprobs) -> dict[str, float]:
        chosen = dict(most_likely(position, self._top))
        chosen.setdefault(token_id, position[token_id])
        result: dict[str, float] = {}
        for other, logprob in chosen.items():
            # Several tokens may be spelt alike (parts of a character); the most likely one counts.
            result.setdefault(_spell(other, logprob, self._as_ids), finite(logprob.logprob))
        return result


def prompt_logprobs(positions: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """vLLM's form: null for the first position, then token id to logprob, rank and text."""
    return [None if position is None else _by_id(position) for position in positions]


def most_likely(position: PositionLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` most likely tokens in order (-1: all); the sampled one only if it is among them."""
    ranked = sorted(position.items(), key=lambda item: (item[1].rank or 0, -item[1].logprob))
    return ranked if top < 0 else [item for item in ranked if (item[1].rank or 1) <= top]


def _by_id(position: PositionLogprobs) -> dict[str, PromptLogprob]:
    return {
        str(token_id): PromptLogprob(finite(entry.logprob), entry.rank, entry.decoded_token)
        for token_id, entry in position.items()
    }


def _spell(token_id: int, logprob: Logprob | None, as_ids: bool) -> str:
    if as_ids or logprob is None or logprob.decoded_token is None:
        return f"token_id:{token_id}"
    return logprob.decoded_token


def _bytes(logprob: Logprob) -> list[int] | None:
    if logprob.decoded_token is None:
        return None
    return list(logprob.decoded_token.encode("utf-8", errors="replace"))

"""ReasoningParams: where a request's reasoning begins and ends in tokens, and how long it may be."""

from __future__ import annotations

import msgspec


class ReasoningParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a server works out from its reasoning parser and the prompt; users do not set it.

    A constraint (``structured_outputs``) holds for what follows the reasoning.

    Args:
        end_token_ids: the tokens after which the answer begins.
        start_token_id: the token that begins reasoning; None where it has begun.
        budget: tokens of reasoning at most, then its end is forced; None is no limit.
    """

    end_token_ids: list[int]
    start_token_id: int | None = None
    budget: int | None = None

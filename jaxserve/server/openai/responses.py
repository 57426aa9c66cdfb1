"""Response bodies and stream chunks of OpenAI's endpoints, with vLLM's extra fields.

A field that is UNSET is left out; None is sent as null, where OpenAI sends null.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from jaxserve.outputs import RequestOutput
from jaxserve.version import __version__

SYSTEM_FINGERPRINT = f"jaxserve-{__version__}"


class PromptLogprob(Struct):
    """One entry of ``prompt_logprobs``."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


# --- usage -------------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    """Tokens of a request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Usage:
        """``cached_tokens`` None leaves them out."""
        details = UNSET if cached_tokens is None else PromptTokensDetails(cached_tokens)
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def usage_of(
    outputs: Sequence[RequestOutput], *, count_completion: bool = True, cached: bool = False
) -> Usage:
    """Usage of complete outputs, one per prompt; ``cached`` names the cached prompt tokens."""
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return Usage.of(
        sum(len(output.prompt_token_ids) for output in outputs),
        completion if count_completion else 0,
        sum(output.num_cached_tokens for output in outputs) if cached else None,
    )


# --- completions -------------------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    """Parallel lists, one entry per token; the prompt's first token has no logprob."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    """A choice of a completion, and of its stream's chunks."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionBody(Struct):
    """A completion, or one chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    usage: Usage | UnsetType | None = UNSET


# --- chat completions --------------------------------------------------------------------------------------


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallChunk(Struct):
    """A part of a call: id, type and name come once, with its first part."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AssistantMessage(Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# --- the rest ----------------------------------------------------------------------------------------------


class ModelPermission(Struct):
    id: str
    created: int
    object: str = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    permission: list[ModelPermission]
    parent: str | None = None
    object: str = "model"
    owned_by: str = "jaxserve"


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class TokenizeBody(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Struct):
    prompt: str


def json_response(body: Struct | dict[str, Any], status: int = 200) -> Response:
    """``body`` as JSON. NaN and infinity cannot appear: they are encoded as null."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def given(value: Iterable[int], wanted: bool | None) -> list[int] | UnsetType:
    """``value`` if the request wants it."""
    return list(value) if wanted else UNSET

"""What /v1/responses answers with: the response, its output items, and the events of its stream.

A field that is UNSET is left out; None is sent as null, where OpenAI sends null.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from jaxserve.server.openai.responses import TopLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


# --- output items ------------------------------------------------------------------------------------------


class OutputLogprob(Struct):
    """One token of an output text."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class OutputText(Struct, tag="output_text"):
    """The one content part of a message."""

    text: str
    annotations: list[Any] = field(default_factory=list[Any])
    logprobs: list[OutputLogprob] = field(default_factory=list[OutputLogprob])


class ReasoningText(Struct, tag="reasoning_text"):
    """The one content part of a reasoning item."""

    text: str


class OutputMessage(Struct, tag="message"):
    """What the assistant says."""

    id: str
    status: ItemStatus = "in_progress"
    content: list[OutputText] = field(default_factory=list[OutputText])
    role: str = "assistant"


class ReasoningItem(Struct, tag="reasoning"):
    """What the model thought before."""

    id: str
    status: ItemStatus = "in_progress"
    content: list[ReasoningText] = field(default_factory=list[ReasoningText])
    summary: list[Any] = field(default_factory=list[Any])
    encrypted_content: None = None


class FunctionCall(Struct, tag="function_call"):
    """A call of one of the request's functions; ``arguments`` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | ReasoningItem | FunctionCall


# --- the response ------------------------------------------------------------------------------------------


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, input_tokens: int, cached: int, output_tokens: int, reasoning: int) -> ResponseUsage:
        return cls(
            input_tokens,
            InputTokensDetails(cached),
            output_tokens,
            OutputTokensDetails(reasoning),
            input_tokens + output_tokens,
        )


class ResponseError(Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class ReasoningConfig(Struct):
    """What the request asked about reasoning."""

    effort: str | None = None
    summary: str | None = None


class TextConfig(Struct):
    """What the request asked about its text."""

    format: dict[str, Any]
    verbosity: str = "medium"


class Response(Struct, kw_only=True):
    """One response; what the request set is repeated in it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = field(default_factory=list[OutputItem])
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | UnsetType = UNSET
    reasoning: ReasoningConfig
    safety_identifier: str | UnsetType = UNSET
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Struct):
    """A page of a response's input items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


# --- events ------------------------------------------------------------------------------------------------


class ResponseEvent(Struct):
    """``response.created``, ``.queued``, ``.in_progress``, ``.completed``, ``.incomplete``, ``.failed``."""

    type: str
    response: Response
    sequence_number: int = 0


class ItemEvent(Struct):
    """``response.output_item.added`` and ``.done``."""

    type: str
    output_index: int
    item: OutputItem
    sequence_number: int = 0


class PartEvent(Struct):
    """``response.content_part.added`` and ``.done``."""

    type: str
    item_id: str
    output_index: int
    part: OutputText | ReasoningText
    content_index: int = 0
    sequence_number: int = 0


class DeltaEvent(Struct):
    """``response.output_text.delta``, ``response.reasoning_text.delta``, ``….function_call_arguments.delta``."""

    type: str
    item_id: str
    output_index: int
    delta: str
    content_index: int | UnsetType = UNSET
    logprobs: list[OutputLogprob] | UnsetType = UNSET
    sequence_number: int = 0


class TextDoneEvent(Struct):
    """``response.output_text.done`` and ``response.reasoning_text.done``."""

    type: str
    item_id: str
    output_index: int
    text: str
    content_index: int = 0
    logprobs: list[OutputLogprob] | UnsetType = UNSET
    sequence_number: int = 0


class ArgumentsDoneEvent(Struct):
    """``response.function_call_arguments.done``."""

    item_id: str
    output_index: int
    name: str
    arguments: str
    type: str = "response.function_call_arguments.done"
    sequence_number: int = 0


Event = ResponseEvent | ItemEvent | PartEvent | DeltaEvent | TextDoneEvent | ArgumentsDoneEvent

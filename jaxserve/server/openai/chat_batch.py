"""POST /v1/chat/completions/batch: several conversations in one request, with one set of parameters.

The answer is one chat completion: choices are numbered conversation by conversation, usage is their sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, cast

from fastapi import APIRouter, Request
from pydantic import PlainValidator, model_validator
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.server.call import begin_call
from jaxserve.server.generation import MAX_PROMPTS, GenerationService
from jaxserve.server.json_body import JSONRoute
from jaxserve.server.openai.chat import ChatAnswer, begin_chat
from jaxserve.server.openai.messages import ChatMessage, check_messages
from jaxserve.server.openai.requests import ChatCompletionRequest
from jaxserve.server.openai.responses import (
    ChatCompletion,
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
    json_response,
)
from jaxserve.server.streaming import run_while_connected

Conversation = list[dict[str, Any]]


def check_conversations(value: Any) -> list[Conversation]:
    """The conversations, each checked as the messages of one request.

    Raises:
        InvalidRequestError: with the field's path, such as ``messages[1][0].content``.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("messages must be a list of conversations.", param="messages")
    conversations = cast("list[Any]", value)
    if len(conversations) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"messages holds {len(conversations)} conversations; at most {MAX_PROMPTS} are allowed.",
            param="messages",
        )
    return [_check(conversation, index) for index, conversation in enumerate(conversations)]


def _check(conversation: Any, index: int) -> Conversation:
    try:
        return check_messages(conversation)
    except InvalidRequestError as error:
        path = f"messages[{index}]"
        message = error.message.replace("messages", path, 1)
        raise InvalidRequestError(
            message, param=(error.param or "messages").replace("messages", path, 1)
        ) from None


class BatchChatRequest(ChatCompletionRequest):
    """POST /v1/chat/completions/batch."""

    endpoint = "batched chat completions"

    messages: Annotated[  # pyright: ignore[reportIncompatibleVariableOverride]
        list[Conversation],
        PlainValidator(check_conversations, json_schema_input_type=list[list[ChatMessage]]),
    ]

    @model_validator(mode="after")
    def _check_batch(self) -> BatchChatRequest:
        if self.stream:
            raise InvalidRequestError("stream is not available for batched chat completions.", param="stream")
        return self

    def conversations(self) -> list[ChatCompletionRequest]:
        """One request a conversation."""
        shared = {name: getattr(self, name) for name in self.model_fields_set - {"messages"}}
        return [
            # The values were validated; a second time some of them would not be what JSON brings.
            ChatCompletionRequest.model_construct(messages=conversation, **shared)
            for conversation in self.messages
        ]


def batch_chat_routes(service: GenerationService) -> APIRouter:
    router = APIRouter(route_class=JSONRoute)

    async def create_chat_completions(body: BatchChatRequest, request: Request) -> Response:
        """Answer several conversations."""
        call = begin_call(request, "chatcmpl", body.request_id, service.resolve_model(body.model))
        service.check_choices(len(body.messages), body.sampling_values().get("n", 1))
        answers: list[ChatAnswer] = []
        try:
            for one in body.conversations():
                answers.append(await begin_chat(service, one, call))
            work = asyncio.gather(*(answer.submission.collect() for answer in answers))
            outputs = await run_while_connected(request.receive, _wait(work))
        finally:
            await asyncio.gather(*(answer.submission.aclose() for answer in answers))
        return json_response(_merge([answer.body(output) for answer, (output,) in zip(answers, outputs)]))

    router.add_api_route("/v1/chat/completions/batch", create_chat_completions, methods=["POST"])
    return router


async def _wait(work: asyncio.Future[Any]) -> Any:
    return await work


def _merge(bodies: Sequence[ChatCompletion]) -> ChatCompletion:
    merged = bodies[0]
    usage = merged.usage
    for body in bodies[1:]:
        start = len(merged.choices)
        for choice in body.choices:
            choice.index += start
        merged.choices += body.choices
        usage = _sum(usage, body.usage)
    merged.usage = usage
    return merged


def _sum(one: Usage, other: Usage) -> Usage:
    total = Usage(
        one.prompt_tokens + other.prompt_tokens,
        one.completion_tokens + other.completion_tokens,
        one.total_tokens + other.total_tokens,
    )
    if one.prompt_tokens_details and other.prompt_tokens_details:
        cached = one.prompt_tokens_details.cached_tokens + other.prompt_tokens_details.cached_tokens
        total.prompt_tokens_details = PromptTokensDetails(cached)
    if one.completion_tokens_details and other.completion_tokens_details:
        reasoning = (
            one.completion_tokens_details.reasoning_tokens + other.completion_tokens_details.reasoning_tokens
        )
        total.completion_tokens_details = CompletionTokensDetails(reasoning)
    return total

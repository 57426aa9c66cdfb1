"""POST /inference/v1/generate: token ids in, token ids out. No template, no text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field
from starlette.responses import Response

from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.call import Call, begin_call, collect
from jaxserve.server.generation import GenerationService, Submission
from jaxserve.server.json_body import JSONRoute
from jaxserve.server.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.server.openai.requests import (
    SAMPLING_FIELDS,
    STRICT,
    Bounded,
    Identifier,
    Int64,
    List,
    SamplingFields,
    StreamOptions,
)
from jaxserve.server.openai.responses import ChatLogprobs, PromptLogprobs, Usage, json_response
from jaxserve.server.streaming import EventStream, event

DEFAULT_MAX_TOKENS = 16
"""Of SamplingParams."""


class GenerateSampling(SamplingFields):
    """SamplingParams, with ``max_tokens`` and ``logprobs`` as its own."""

    model_config = STRICT

    max_tokens: Int64 | None = None
    logprobs: Int64 | None = None
    detokenize: bool | None = None

    def values(self) -> dict[str, Any]:
        """What is given; text is made only where stop strings need it."""
        values = {name: getattr(self, name) for name in (*SAMPLING_FIELDS, "max_tokens", "logprobs")}
        given = {name: value for name, value in values.items() if value is not None}
        return {**given, "detokenize": bool(values["stop"])}


class GenerateRequest(Bounded):
    """POST /inference/v1/generate."""

    model_config = STRICT

    model: str | None = None
    request_id: Identifier | None = None
    token_ids: List[Annotated[int, Field(ge=0, lt=2**63)]]
    sampling_params: GenerateSampling = Field(default_factory=lambda: GenerateSampling())
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None


class GenerateChoice(Struct):
    """One completion; in a stream, what is new of it."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateBody(Struct):
    """The answer, or one chunk of its stream."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET


def generate_routes(service: GenerationService) -> APIRouter:
    router = APIRouter(route_class=JSONRoute)

    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Complete token ids with token ids."""
        call = begin_call(request, "generate-tokens", body.request_id, service.resolve_model(body.model))
        params = service.sampling_params(
            body.sampling_params.values(),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            max_tokens_param="sampling_params.max_tokens",
            stream=bool(body.stream),
        )
        submission = await service.submit(
            call.id, [body.token_ids], params, priority=body.priority or 0, cache_salt=body.cache_salt
        )
        if body.stream:
            return EventStream(_events(body, call, params, submission), submission.aclose)
        (output,) = await collect(request, submission)
        answer = GenerateBody(call.id, [_choice(choice, params) for choice in output.outputs])
        answer.prompt_logprobs = None
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        answer.usage = _usage(output, sum(len(choice.token_ids) for choice in output.outputs), submission)
        return json_response(answer)

    router.add_api_route("/inference/v1/generate", generate, methods=["POST"])
    return router


async def _events(
    body: GenerateRequest, call: Call, params: SamplingParams, submission: Submission
) -> AsyncIterator[bytes]:
    num_tokens = 0
    options = body.stream_options
    last: RequestOutput | None = None
    async for _, output in submission.outputs():
        num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        yield event(GenerateBody(call.id, [_choice(choice, params) for choice in output.outputs]))
        last = output
    if last is not None and options is not None and options.include_usage:
        yield event(GenerateBody(call.id, [], usage=_usage(last, num_tokens, submission)))


def _choice(choice: CompletionOutput, params: SamplingParams) -> GenerateChoice:
    logprobs = None
    if params.logprobs is not None and choice.logprobs:
        logprobs = chat_logprobs(choice.token_ids, choice.logprobs, params.logprobs, as_ids=True)
    return GenerateChoice(
        choice.index, list(choice.token_ids), logprobs, choice.finish_reason, choice.stop_reason
    )


def _usage(output: RequestOutput, completion_tokens: int, submission: Submission) -> Usage:
    cached = output.num_cached_tokens if submission.reports_cached_tokens else None
    return Usage.of(len(output.prompt_token_ids), completion_tokens, cached)

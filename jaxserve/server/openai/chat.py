"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.parsers import OutputDelta, OutputParser, parse_output
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.call import Call, begin_call, collect
from jaxserve.server.generation import GenerationService, Submission
from jaxserve.server.json_body import JSONRoute
from jaxserve.server.openai.chat_message import NOTHING, delta_of, finish_reason, message_of
from jaxserve.server.openai.chat_prompt import chat_prompt
from jaxserve.server.openai.logprobs import chat_logprobs, prompt_logprobs
from jaxserve.server.openai.messages import text_of
from jaxserve.server.openai.requests import ChatCompletionRequest
from jaxserve.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    CompletionTokensDetails,
    Delta,
    Usage,
    given,
    json_response,
    usage_of,
)
from jaxserve.server.openai.tool_output import plan_output
from jaxserve.server.streaming import EventStream, event


def chat_routes(service: GenerationService) -> APIRouter:
    router = APIRouter(route_class=JSONRoute)

    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation."""
        call = begin_call(request, "chatcmpl", body.request_id, service.resolve_model(body.model))
        answer = await begin_chat(service, body, call)
        if body.stream:
            return EventStream(answer.events(), answer.submission.aclose)
        return json_response(answer.body((await collect(request, answer.submission))[0]))

    router.add_api_route("/v1/chat/completions", create_chat_completion, methods=["POST"])
    return router


async def begin_chat(service: GenerationService, body: ChatCompletionRequest, call: Call) -> ChatAnswer:
    """Admit a conversation, and render its answer with what is returned."""
    plan = plan_output(
        service,
        body.messages,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning_effort,
        thinking_token_budget=body.thinking_token_budget,
        template_kwargs=body.chat_template_kwargs,
        template=body.chat_template,
        continue_final_message=bool(body.continue_final_message),
    )
    params = _sampling_params(service, body)
    prompt = await chat_prompt(
        service,
        plan.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=plan.tools,
        documents=body.documents,
        kwargs=plan.template_kwargs,
        template=body.chat_template,
    )
    params = plan.sampling_params(params, prompt)
    submission = await service.submit(
        call.id,
        [prompt],
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        add_special_tokens=bool(body.add_special_tokens),  # the template writes them itself
    )
    return ChatAnswer(body, call, submission, lambda: plan.parser(prompt, params))


def _sampling_params(service: GenerationService, body: ChatCompletionRequest) -> SamplingParams:
    requested = body.sampling_values()
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, name)
    if max_tokens is not None:
        requested["max_tokens"] = max_tokens
    if body.logprobs:
        requested["logprobs"] = body.top_logprobs or 0
    return service.sampling_params(
        requested, default_max_tokens=None, max_tokens_param=name, stream=bool(body.stream)
    )


class ChatAnswer:
    """Renders the outputs of one chat completion, whole or chunk by chunk.

    Args:
        body: the request.
        call: the HTTP call.
        submission: the admitted request.
        new_parser: makes a parser for a choice.
    """

    def __init__(
        self,
        body: ChatCompletionRequest,
        call: Call,
        submission: Submission,
        new_parser: Callable[[], OutputParser],
    ) -> None:
        self.submission = submission
        self._new_parser = new_parser
        self._parsers: dict[int, OutputParser] = {}
        self._body = body
        self._call = call
        self._num_tokens: dict[int, int] = {}
        """Tokens sent of each choice."""

    # --- whole ------------------------------------------------------------------------------------------

    def body(self, output: RequestOutput) -> ChatCompletion:
        """The answer to a request that is not streamed."""
        call = self._call
        choices = [self._choice(choice) for choice in output.outputs]
        usage = usage_of([output], cached=self.submission.reports_cached_tokens)
        usage.completion_tokens_details = self._token_details(self._parsers)
        answer = ChatCompletion(
            call.id,
            call.created,
            call.model,
            choices,
            usage,
            prompt_token_ids=given(output.prompt_token_ids, self._body.return_token_ids),
        )
        if self._body.return_prompt_text:
            answer.prompt_text = output.prompt
        if output.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return answer

    def _choice(self, choice: CompletionOutput) -> ChatChoice:
        parser = self._parsers[choice.index] = self._new_parser()
        parsed = parse_output(parser, choice.text, choice.token_ids)
        return ChatChoice(
            choice.index,
            message_of(parsed, self._echo(), include_reasoning=self._include_reasoning),
            self._logprobs(choice),
            finish_reason(choice, parser),
            choice.stop_reason,
            given(choice.token_ids, self._body.return_token_ids),
        )

    # --- streamed ---------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """The answer's chunks as they come."""
        last: RequestOutput | None = None
        async for _, output in self.submission.outputs():
            chunks = [self._events(output, choice) for choice in output.outputs]
            if any(chunks):
                yield b"".join(chunks)
            last = output
        if self._body.include_usage and last is not None:
            usage = self._usage(last, sum(self._num_tokens.values()))
            usage.completion_tokens_details = self._token_details(self._parsers)
            yield event(self._chunk([], usage))

    def _events(self, output: RequestOutput, choice: CompletionOutput) -> bytes:
        start = b"" if choice.index in self._num_tokens else self._start(output, choice.index)
        self._num_tokens[choice.index] += len(choice.token_ids)
        parser = self._parsers[choice.index]
        delta = delta_of(self._parse(parser, choice), include_reasoning=self._include_reasoning)
        logprobs = self._logprobs(choice)
        silent = (delta is NOTHING or delta == NOTHING) and logprobs is None and choice.finish_reason is None
        if silent and not (self._body.continuous_usage or self._body.return_token_ids):
            return start
        rendered = ChatChunkChoice(
            choice.index,
            delta,
            logprobs,
            finish_reason(choice, parser),
            UNSET if choice.finish_reason is None else choice.stop_reason,
            given(choice.token_ids, self._body.return_token_ids),
        )
        return start + event(self._chunk([rendered], self._chunk_usage(output, choice.index)))

    def _parse(self, parser: OutputParser, choice: CompletionOutput) -> list[OutputDelta]:
        """What a piece decides; the last one comes with all that was held back."""
        deltas = parser.feed(choice.text, choice.token_ids)
        return deltas if choice.finish_reason is None else deltas + parser.finish()

    def _start(self, output: RequestOutput, index: int) -> bytes:
        """A choice's first chunk: the role; with ``echo`` also what the answer continues."""
        self._num_tokens[index] = 0
        self._parsers[index] = self._new_parser()
        first_of_all = len(self._num_tokens) == 1
        chunk = self._chunk(
            [ChatChunkChoice(index, Delta("assistant", self._echo()))], self._chunk_usage(output, index)
        )
        if first_of_all:
            chunk.prompt_token_ids = given(output.prompt_token_ids, self._body.return_token_ids)
        return event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        call = self._call
        return ChatChunk(call.id, call.created, call.model, choices, usage=usage)

    def _chunk_usage(self, output: RequestOutput, index: int) -> Usage | UnsetType | None:
        if self._body.continuous_usage:
            usage = self._usage(output, self._num_tokens[index])
            usage.completion_tokens_details = self._token_details([index])
            return usage
        return None if self._body.include_usage else UNSET

    # --- both -------------------------------------------------------------------------------------------

    def _usage(self, output: RequestOutput, completion_tokens: int) -> Usage:
        cached = output.num_cached_tokens if self.submission.reports_cached_tokens else None
        return Usage.of(len(output.prompt_token_ids), completion_tokens, cached)

    def _token_details(self, indices: Iterable[int]) -> CompletionTokensDetails | UnsetType:
        """The reasoning's share of the tokens of some choices, where there is reasoning."""
        num_tokens = sum(self._parsers[index].num_reasoning_tokens for index in indices)
        return CompletionTokensDetails(num_tokens) if num_tokens else UNSET

    @property
    def _include_reasoning(self) -> bool:
        return self._body.include_reasoning is not False

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        if not self._body.logprobs or not choice.logprobs:
            return None
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(choice.token_ids, choice.logprobs, self._body.top_logprobs or 0, as_ids=as_ids)

    def _echo(self) -> str:
        last = self._body.messages[-1]
        return text_of(last) if self._body.echo and last["role"] == "assistant" else ""

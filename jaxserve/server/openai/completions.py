"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from jaxserve.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.call import Call, begin_call, collect
from jaxserve.server.generation import GenerationService, Submission
from jaxserve.server.json_body import JSONRoute
from jaxserve.server.openai.logprobs import CompletionLogprobsBuilder, prompt_logprobs
from jaxserve.server.openai.requests import CompletionRequest
from jaxserve.server.openai.responses import (
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
    given,
    json_response,
    usage_of,
)
from jaxserve.server.streaming import EventStream, event

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def completion_routes(service: GenerationService) -> APIRouter:
    router = APIRouter(route_class=JSONRoute)

    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Complete a prompt, or several: choices are numbered prompt by prompt."""
        call = begin_call(request, "cmpl", body.request_id, service.resolve_model(body.model))
        answer = await _submit(service, body, call)
        if body.stream:
            return EventStream(answer.events(), answer.submission.aclose)
        return json_response(answer.body(await collect(request, answer.submission)))

    router.add_api_route("/v1/completions", create_completion, methods=["POST"])
    return router


async def _submit(service: GenerationService, body: CompletionRequest, call: Call) -> CompletionAnswer:
    if body.echo and not all(isinstance(prompt, str) for prompt in body.prompt):
        _ = service.tokenizer  # it will turn ids into text: refuse now if there is none
    params = _sampling_params(service, body)
    submission = await service.submit(
        call.id,
        body.prompt,
        params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        add_special_tokens=body.add_special_tokens is not False,
    )
    return CompletionAnswer(service, body, call, params, submission)


def _sampling_params(service: GenerationService, body: CompletionRequest) -> SamplingParams:
    requested = body.sampling_values()
    stream = bool(body.stream)
    if body.max_tokens is not None:
        # Scoring a prompt: one token is generated and thrown away.
        requested["max_tokens"] = 1 if _prompt_only(body) else body.max_tokens
    if body.logprobs is not None:
        requested["logprobs"] = body.logprobs
    params = service.sampling_params(requested, default_max_tokens=DEFAULT_MAX_TOKENS, stream=stream)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = params.clone(prompt_logprobs=body.logprobs)
    return params


def _prompt_only(body: CompletionRequest) -> bool:
    return bool(body.echo) and body.max_tokens == 0


@dataclass
class ChoiceState:
    """What has been sent of one choice."""

    builder: CompletionLogprobsBuilder
    started: bool = False
    num_tokens: int = 0


class CompletionAnswer:
    """Renders the outputs of one completion request, whole or chunk by chunk."""

    def __init__(
        self,
        service: GenerationService,
        body: CompletionRequest,
        call: Call,
        params: SamplingParams,
        submission: Submission,
    ) -> None:
        self.submission = submission
        self._service = service
        self._body = body
        self._call = call
        self._params = params
        self._prompt_only = _prompt_only(body)
        self._wants_prompt_logprobs = "prompt_logprobs" in body.sampling_values()  # or echo needs them
        self._choices: dict[int, ChoiceState] = {}

    # --- whole ------------------------------------------------------------------------------------------

    def body(self, outputs: Sequence[RequestOutput]) -> CompletionBody:
        """The answer to a request that is not streamed."""
        choices = [
            self._choice(index, output, choice)
            for index, output in enumerate(outputs)
            for choice in output.outputs
        ]
        cached = self.submission.reports_cached_tokens
        usage = usage_of(outputs, count_completion=not self._prompt_only, cached=cached)
        return self._chunk(choices, usage)

    # --- streamed ---------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[bytes]:
        """The answer's chunks as they come."""
        totals: dict[int, tuple[int, int]] = {}
        async for index, output in self.submission.outputs():
            totals[index] = (len(output.prompt_token_ids), output.num_cached_tokens)
            chunks = [self._event(index, output, choice) for choice in output.outputs]
            if any(chunks):
                yield b"".join(chunks)
        if self._body.include_usage:
            completion = 0 if self._prompt_only else sum(state.num_tokens for state in self._choices.values())
            prompt, cached = (sum(column) for column in zip(*totals.values()))
            yield event(self._chunk([], self._usage(prompt, completion, cached)))

    def _event(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> bytes:
        chunk_choice = self._choice(prompt_index, output, choice)
        state = self._choices[chunk_choice.index]
        state.num_tokens += len(choice.token_ids)
        silent = not chunk_choice.text and chunk_choice.logprobs is None and choice.finish_reason is None
        if silent and not (self._body.continuous_usage or self._body.return_token_ids):
            return b""
        usage: Usage | UnsetType | None = UNSET
        if self._body.continuous_usage:
            usage = self._usage(len(output.prompt_token_ids), state.num_tokens, output.num_cached_tokens)
        elif self._body.include_usage:
            usage = None
        return event(self._chunk([chunk_choice], usage))

    def _usage(self, prompt: int, completion: int, cached: int) -> Usage:
        return Usage.of(prompt, completion, cached if self.submission.reports_cached_tokens else None)

    # --- both -------------------------------------------------------------------------------------------

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionBody:
        call = self._call
        return CompletionBody(call.id, call.created, call.model, choices, usage=usage)

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        index = prompt_index * self._params.n + choice.index
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = ChoiceState(self._builder())
        first, state.started = not state.started, True
        token_ids = [] if self._prompt_only else choice.token_ids
        rendered = CompletionChoice(
            index,
            "" if self._prompt_only else choice.text,
            self._logprobs(state, output, choice, first),
            choice.finish_reason,
            choice.stop_reason,
            given(token_ids, self._body.return_token_ids),
        )
        if first:
            self._add_prompt(rendered, output)
        if self._prompt_only:
            rendered.stop_reason = None
            rendered.finish_reason = choice.finish_reason and "length"
        return rendered

    def _add_prompt(self, rendered: CompletionChoice, output: RequestOutput) -> None:
        rendered.prompt_token_ids = given(output.prompt_token_ids, self._body.return_token_ids)
        if self._wants_prompt_logprobs and output.prompt_logprobs is not None:
            rendered.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self._body.echo:
            rendered.text = self._prompt_text(output) + rendered.text

    def _logprobs(
        self, state: ChoiceState, output: RequestOutput, choice: CompletionOutput, first: bool
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        token_ids: list[int] = []
        positions: list[PositionLogprobs | None] = []
        if first and self._body.echo and output.prompt_logprobs is not None:
            token_ids += output.prompt_token_ids
            positions += output.prompt_logprobs
        if not self._prompt_only and choice.logprobs is not None:
            token_ids += choice.token_ids
            positions += choice.logprobs
        return state.builder.build(token_ids, positions) if token_ids else None

    def _builder(self) -> CompletionLogprobsBuilder:
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return CompletionLogprobsBuilder(
            self._body.logprobs or 0, as_ids=as_ids, decode=lambda token_id: self._decode([token_id])
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        whole = "truncate_prompt_tokens" not in self._body.sampling_values()
        return output.prompt if whole and output.prompt is not None else self._decode(output.prompt_token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._service.tokenizer.decode(token_ids, skip_special_tokens=False)

"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.server import conversation
from jaxserve.server.anthropic.builder import MessageBuilder
from jaxserve.server.anthropic.objects import Event, Message, StopReason, TokenCount, Usage
from jaxserve.server.anthropic.requests import CountTokensRequest, MessageRequest
from jaxserve.server.conversation import Reply
from jaxserve.server.errors import anthropic_error
from jaxserve.server.generation import GenerationService
from jaxserve.server.json_body import JSONRoute
from jaxserve.server.openai.responses import json_response
from jaxserve.server.streaming import EventStream, run_while_connected


def message_routes(service: GenerationService) -> APIRouter:
    router = APIRouter(route_class=JSONRoute)

    async def create_message(body: MessageRequest, request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        answer = await _submit(service, body)
        if body.stream:

            def render_error(error: Exception) -> bytes:
                return encode_event("error", anthropic_error(error, request.state.request_id))

            return EventStream(answer.events(), answer.aclose, render_error=render_error, end=b"")
        try:
            return json_response(await run_while_connected(request.receive, answer.finish()))
        finally:
            await answer.aclose()

    async def count_tokens(body: CountTokensRequest) -> Response:
        """How many tokens a conversation has, after the chat template."""
        service.resolve_model(body.model)
        _, prompt = await conversation.render(service, body.conversation(service))
        tokens = await asyncio.to_thread(service.engine.encode, prompt, add_special_tokens=False)
        return json_response(TokenCount(len(tokens)))

    router.add_api_route("/v1/messages", create_message, methods=["POST"])
    router.add_api_route("/v1/messages/count_tokens", count_tokens, methods=["POST"])
    return router


async def _submit(service: GenerationService, body: MessageRequest) -> MessageAnswer:
    model = service.resolve_model(body.model)
    message_id = f"msg_{body.request_id or secrets.token_hex(16)}"
    params = service.sampling_params(
        body.sampling_values(), default_max_tokens=None, stream=bool(body.stream)
    )
    reply = await conversation.submit(
        service,
        body.conversation(service),
        params,
        request_id=message_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    message = Message(message_id, model, [], Usage(0, 0))
    return MessageAnswer(message, reply, show_thinking=body.show_thinking)


class MessageAnswer:
    """Renders the reply to one request, whole or event by event."""

    def __init__(self, message: Message, reply: Reply, *, show_thinking: bool) -> None:
        self._reply = reply
        self._builder = MessageBuilder(message, show_thinking=show_thinking)

    async def aclose(self) -> None:
        """Leave; what has not finished is aborted."""
        await self._reply.aclose()

    async def finish(self) -> Message:
        """The complete message.

        Raises:
            JaxserveError: the engine failed.
        """
        async for _ in self.events():
            pass
        return self._builder.message

    async def events(self) -> AsyncIterator[bytes]:
        """The stream. It begins with the first output: only then is it known what the prompt took."""
        started = False
        async for _, deltas in self._reply.read():
            events: list[Event] = []
            if not started:
                self._builder.message.usage = self._usage(0)
                events = self._builder.start()
                started = True
            events += self._builder.add(deltas)
            if events:
                yield _encode(events)
        reply = self._reply
        reason, sequence = self._stop_reason()
        yield _encode(self._builder.finish(reason, sequence, self._usage(reply.num_tokens)))

    def _usage(self, output_tokens: int) -> Usage:
        return Usage.of(self._reply.num_prompt_tokens, self._reply.num_cached_tokens, output_tokens)

    def _stop_reason(self) -> tuple[StopReason, str | None]:
        reply = self._reply
        if reply.finish_reason == "length":
            return "max_tokens", None
        if isinstance(reply.stop_reason, str):
            return "stop_sequence", reply.stop_reason
        return ("tool_use" if reply.num_calls else "end_turn"), None


def _encode(events: Iterable[Event]) -> bytes:
    return b"".join(encode_event(event.__struct_config__.tag, event) for event in events)


def encode_event(name: object, event: msgspec.Struct) -> bytes:
    """One server-sent event with its name."""
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"

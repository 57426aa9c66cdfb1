"""POST /v1/responses, and what can be done with a stored response: retrieve, cancel, delete, list its input."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from msgspec import UNSET
from starlette.responses import Response as HTTPResponse

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server import conversation
from jaxserve.server.conversation import Conversation
from jaxserve.server.generation import GenerationService
from jaxserve.server.json_body import JSONRoute
from jaxserve.server.openai.responses import json_response
from jaxserve.server.openai.responses_api.input_items import chat_messages, resolve_references
from jaxserve.server.openai.responses_api.objects import (
    DeletedResponse,
    ItemList,
    ReasoningConfig,
    Response,
    TextConfig,
)
from jaxserve.server.openai.responses_api.requests import ResponseRequest
from jaxserve.server.openai.responses_api.run import ResponseRun
from jaxserve.server.openai.responses_api.store import EventLog, ResponseStore, StoredResponse
from jaxserve.server.streaming import EventStream, run_while_connected


def response_routes(service: GenerationService, store: ResponseStore) -> APIRouter:
    router = APIRouter(route_class=JSONRoute)

    async def create_response(body: ResponseRequest, request: Request) -> HTTPResponse:
        """Answer an input, and go on from an earlier response if one is named."""
        run = await _admit(service, store, body)
        if body.background:
            run.start(log=bool(body.stream))
            if run.entry.log is not None:
                return _follow(run.entry.log, 0)
            return json_response(run.response)
        if body.stream:
            return EventStream(run.events(), run.aclose, end=b"")
        try:
            return json_response(await run_while_connected(request.receive, run.finish()))
        finally:
            await run.aclose()

    async def retrieve_response(
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
        include: Annotated[list[Literal["message.output_text.logprobs"]] | None, Query()] = None,
        include_obfuscation: Literal["false", None] = None,
    ) -> HTTPResponse:
        """A stored response as it is now, or the events of one that was made with background and stream."""
        entry = store.get(response_id)
        if not stream:
            if starting_after is not None:
                raise InvalidRequestError("starting_after needs stream=true.", param="starting_after")
            return json_response(entry.response)
        if entry.log is None:
            raise InvalidRequestError(
                "Only a response created with background=true and stream=true can be streamed again.",
                param="stream",
            )
        return _follow(entry.log, 0 if starting_after is None else starting_after + 1)

    async def cancel_response(response_id: str) -> HTTPResponse:
        """End a background response; one that has ended already is returned as it is."""
        entry = store.get(response_id)
        if not entry.response.background:
            raise InvalidRequestError(
                "Only a response created with background=true can be cancelled.", param="response_id"
            )
        await _stop(entry)
        return json_response(entry.response)

    async def delete_response(response_id: str) -> HTTPResponse:
        """Forget a response; one that still runs is cancelled."""
        await _stop(store.delete(response_id))
        return json_response(DeletedResponse(response_id))

    async def list_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        include: Annotated[list[Literal["message.output_text.logprobs"]] | None, Query()] = None,
    ) -> HTTPResponse:
        """What a response was asked, item by item."""
        return json_response(_page(store.get(response_id).input_items, limit, order, after))

    router.add_api_route("/v1/responses", create_response, methods=["POST"])
    router.add_api_route("/v1/responses/{response_id}", retrieve_response, methods=["GET"])
    router.add_api_route("/v1/responses/{response_id}", delete_response, methods=["DELETE"])
    router.add_api_route("/v1/responses/{response_id}/cancel", cancel_response, methods=["POST"])
    router.add_api_route("/v1/responses/{response_id}/input_items", list_input_items, methods=["GET"])
    return router


# --- creating ----------------------------------------------------------------------------------------------


async def _admit(service: GenerationService, store: ResponseStore, body: ResponseRequest) -> ResponseRun:
    model = service.resolve_model(body.model)
    response_id = f"resp_{body.request_id or secrets.token_hex(24)}"
    stored = _wants_store(store, body)
    history = _history(store, body.previous_response_id)
    _check_place(store, response_id, body)
    params = _sampling_params(service, body)
    items = resolve_references(body.input, store.items)
    messages = [*history, *chat_messages(items)]
    reply = await conversation.submit(
        service,
        _conversation(body, messages),
        params,
        request_id=response_id,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    try:
        _check_place(store, response_id, body)  # others may have come meanwhile
    except BaseException:
        await reply.aclose()
        raise
    response = _response(body, response_id, model, params, stored)
    return ResponseRun(
        response,
        reply,
        store if stored else None,
        messages,
        items,
        body.num_logprobs,
        include_reasoning=body.include_reasoning is not False,
    )


def _check_place(store: ResponseStore, response_id: str, body: ResponseRequest) -> None:
    """Refuse an id that is taken, and one response more in the background than memory can hold."""
    if response_id in store:
        raise InvalidRequestError(
            f"request_id {body.request_id!r} is the one of a stored response.", param="request_id"
        )
    if body.background:
        store.check_room()


def _wants_store(store: ResponseStore, body: ResponseRequest) -> bool:
    """OpenAI stores by default. A server without a store does not, and refuses what would need it."""
    if store.enabled:
        return body.store is not False
    for name in ("store", "background", "previous_response_id"):
        if getattr(body, name):
            raise InvalidRequestError(
                f"{name} is not available: this server stores no responses (--response-store-bytes 0, or "
                "--api-server-count above 1).",
                param=name,
            )
    return False


def _history(store: ResponseStore, previous_id: str | None) -> Sequence[dict[str, Any]]:
    """The messages that a response goes on from."""
    if previous_id is None:
        return ()
    previous = store.get(previous_id, param="previous_response_id")
    if previous.response.status not in ("completed", "incomplete"):
        raise InvalidRequestError(
            f"previous_response_id names a response that is {previous.response.status}.",
            param="previous_response_id",
        )
    return previous.messages


def _conversation(body: ResponseRequest, messages: list[dict[str, Any]]) -> Conversation:
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    return Conversation(
        [*instructions, *messages],
        tools=body.chat_tools,
        tool_choice=body.chat_tool_choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        thinking_token_budget=body.thinking_token_budget,
        template_kwargs=body.chat_template_kwargs,
        names={"reasoning_effort": "reasoning.effort"},
    )


def _sampling_params(service: GenerationService, body: ResponseRequest) -> SamplingParams:
    requested = body.sampling_values()
    if body.max_output_tokens is not None:
        requested["max_tokens"] = body.max_output_tokens
    if body.num_logprobs is not None:
        requested["logprobs"] = body.num_logprobs
    if body.constraint is not None:
        requested["structured_outputs"] = body.constraint
    return service.sampling_params(
        requested,
        default_max_tokens=None,
        max_tokens_param="max_output_tokens",
        stream=bool(body.stream),
    )


def _response(
    body: ResponseRequest, response_id: str, model: str, params: SamplingParams, stored: bool
) -> Response:
    """The response as it begins."""
    reasoning = body.reasoning
    return Response(
        id=response_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=UNSET if body.prompt_cache_key is None else body.prompt_cache_key,
        reasoning=ReasoningConfig() if reasoning is None else ReasoningConfig(reasoning.effort),
        safety_identifier=UNSET if body.safety_identifier is None else body.safety_identifier,
        store=stored,
        temperature=params.temperature,
        text=TextConfig(body.text_format),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation="disabled",
        user=body.user,
    )


# --- stored ones -------------------------------------------------------------------------------------------


def _follow(log: EventLog, start: int) -> EventStream:
    """A stream that a client may leave without ending the response."""

    async def nothing() -> None:
        pass

    return EventStream(log.follow(start), nothing, end=b"")


async def _stop(entry: StoredResponse) -> None:
    if entry.cancel is not None:
        await entry.cancel()


def _page(items: Sequence[dict[str, Any]], limit: int, order: str, after: str | None) -> ItemList:
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        positions = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not positions:
            raise InvalidRequestError(f"after: there is no item {after[:100]!r}.", param="after")
        ordered = ordered[positions[0] + 1 :]
    page = ordered[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(page, first, last, len(ordered) > limit)

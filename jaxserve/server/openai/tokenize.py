"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, PlainValidator, model_validator
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation import GenerationService
from jaxserve.server.json_body import JSONRoute
from jaxserve.server.openai.chat_prompt import chat_prompt
from jaxserve.server.openai.messages import ChatMessage, check_messages
from jaxserve.server.openai.requests import STRICT, Bounded, List
from jaxserve.server.openai.responses import DetokenizeBody, TokenizeBody, json_response
from jaxserve.server.openai.tool_output import plan_output
from jaxserve.server.openai.tools import ToolField, check_tools


class TokenizeRequest(Bounded):
    """A text, or messages for the chat template."""

    model_config = STRICT

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[
            list[dict[str, Any]], PlainValidator(check_messages, json_schema_input_type=list[ChatMessage])
        ]
        | None
    ) = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: (
        Annotated[list[dict[str, Any]], PlainValidator(check_tools, json_schema_input_type=list[ToolField])]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Send either prompt or messages.", param="prompt")
        if self.tools is not None and self.messages is None:
            raise InvalidRequestError("tools need messages.", param="tools")
        return self


class DetokenizeRequest(Bounded):
    """Token ids."""

    model_config = STRICT

    model: str | None = None
    tokens: List[Annotated[int, Field(ge=0)]]


def tokenize_routes(service: GenerationService) -> APIRouter:
    router = APIRouter(route_class=JSONRoute)

    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of messages after the chat template."""
        service.resolve_model(body.model)
        tokenizer = service.tokenizer
        text, special = await _text(service, body)
        tokens = await asyncio.to_thread(service.engine.encode, text, add_special_tokens=special)
        strings = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return json_response(TokenizeBody(len(tokens), service.max_model_len, tokens, strings))

    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.resolve_model(body.model)
        limit = max(service.engine.info.vocab_size, service.tokenizer.vocab_size)
        for index, token in enumerate(body.tokens):
            if token >= limit:
                raise InvalidRequestError(
                    f"tokens[{index}] is {token}, out of vocabulary: ids are below {limit}.", param="tokens"
                )
        text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response(DetokenizeBody(text))

    router.add_api_route("/tokenize", tokenize, methods=["POST"])
    router.add_api_route("/detokenize", detokenize, methods=["POST"])
    return router


async def _text(service: GenerationService, body: TokenizeRequest) -> tuple[str, bool]:
    """The text to tokenize, and whether special tokens are to be added to it."""
    if body.messages is None:
        return body.prompt or "", body.add_special_tokens is not False
    plan = plan_output(service, body.messages, tools=body.tools, template_kwargs=body.chat_template_kwargs)
    text = await chat_prompt(
        service,
        plan.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=plan.tools,
        kwargs=plan.template_kwargs,
    )
    return text, bool(body.add_special_tokens)

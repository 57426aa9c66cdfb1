"""Chat messages to the prompt's text, for chat completions and /tokenize alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation import GenerationService
from jaxserve.tokenizer import chat_template


async def chat_prompt(
    service: GenerationService,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> str:
    """Render the chat template, off the event loop: a long conversation takes a while.

    Raises:
        InvalidRequestError: there is no template, or it refuses these messages, or the request brings one
            (``template``) and may not.
    """
    if template is not None and not service.limits.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template: this server renders no templates of requests (--trust-request-chat-template).",
            param="chat_template",
        )
    continued = bool(continue_final_message)
    return await asyncio.to_thread(
        chat_template.render,
        service.tokenizer,
        messages,
        chat_template=template or service.chat_template,
        add_generation_prompt=not continued if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continued,
        tools=tools,
        documents=documents,
        kwargs=kwargs,
    )

"""Chat messages to the prompt's text, for chat completions and /tokenize alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.server.generation import GenerationService
from jaxserve.tokenizer import chat_template


async def chat_prompt(
    service: GenerationService,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render the chat template, off the event loop: a long conversation takes a while.

    Raises:
        InvalidRequestError: there is no template, or it refuses these messages.
    """
    continued = bool(continue_final_message)
    return await asyncio.to_thread(
        chat_template.render,
        service.tokenizer,
        messages,
        chat_template=service.chat_template,
        add_generation_prompt=not continued if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continued,
        documents=documents,
        kwargs=kwargs,
    )

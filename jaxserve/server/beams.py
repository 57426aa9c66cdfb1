"""Beam search behind the endpoints: one request of a client becomes one request of the engine a beam and step."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from jaxserve.engine.beam_search import BeamSearch, completion_of, next_logprobs, step_params
from jaxserve.engine.protocol import EngineClient, Prompt, RequestStream
from jaxserve.errors import RequestFailedError
from jaxserve.outputs import PositionLogprobs, RequestOutput
from jaxserve.sampling_params import BeamSearchParams, SamplingParams

_Submit = Callable[[list[int], int], Awaitable[RequestStream]]


class BeamSamplingParams(SamplingParams, kw_only=True):
    """The parameters of a request for beam search: ``n`` choices, as ``beam`` says they are found."""

    beam: BeamSearchParams


class BeamRequests:
    """Admits requests with BeamSamplingParams, as an engine admits others.

    Args:
        engine: where each step's sequences go.
        params: of the request.
        aborting: asked between steps; True ends the search.
    """

    def __init__(
        self, engine: EngineClient, params: BeamSamplingParams, aborting: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._aborting = aborting
        self._params = params
        self._beam = params.beam
        self._step = step_params(params.beam, len(engine.eos_token_ids), engine.max_logprobs)
        self._first = self._step.clone(
            truncate_prompt_tokens=params.truncate_prompt_tokens, truncation_side=params.truncation_side
        )

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> BeamStream:
        """Begin a search: the prompt itself is checked and computed first.

        Raises:
            InvalidRequestError, QueueFullError, EngineDeadError: as the engine's ``add_request``.
        """
        name = request_id or "beams"

        async def submit(token_ids: list[int], index: int) -> RequestStream:
            return await self._engine.add_request(
                token_ids,
                self._step,
                request_id=f"{name}-{index}",
                priority=priority,
                cache_salt=cache_salt,
                add_special_tokens=False,
            )

        first = await self._engine.add_request(
            prompt,
            self._first,
            request_id=name,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
        )
        return BeamStream(self._run(first, submit), first)

    async def _run(self, first: RequestStream, submit: _Submit) -> RequestOutput:
        output = await _last(first)
        search = BeamSearch(
            output.prompt_token_ids, self._beam, self._engine.eos_token_ids, self._engine.info.max_model_len
        )
        search.advance([next_logprobs(output)])
        steps = 0
        while not search.finished:
            if self._aborting():
                raise RequestFailedError("The server is shutting down: the beam search was aborted.")
            search.advance(await self._score(search.prompts(), submit, steps))
            steps += self._beam.beam_width
        output.outputs = [
            completion_of(beam, index, self._beam, self._engine.tokenizer, self._params.logprobs)
            for index, beam in enumerate(search.best())
        ]
        output.finished = True
        return output

    async def _score(
        self, prompts: list[list[int]], submit: _Submit, first_index: int
    ) -> list[PositionLogprobs]:
        """The most likely next tokens of each sequence; whatever ends it early leaves no request behind."""
        streams: list[RequestStream] = []
        try:
            for index, prompt in enumerate(prompts, first_index):
                streams.append(await submit(prompt, index))
            return [next_logprobs(await _last(stream)) for stream in streams]
        finally:
            await asyncio.gather(*(stream.aclose() for stream in streams))


class BeamStream:
    """The one output of a search, as a stream. ``aclose`` ends the search."""

    def __init__(self, search: Coroutine[Any, Any, RequestOutput], first: RequestStream) -> None:
        self._first = first
        self._task = asyncio.ensure_future(search)
        self._taken = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._taken:
            raise StopAsyncIteration
        self._taken = True
        return await self._task

    async def aclose(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task
        await self._first.aclose()


async def _last(stream: RequestStream) -> RequestOutput:
    last: RequestOutput | None = None
    async for output in stream:
        last = output
    if last is None:
        raise RequestFailedError("The engine ended a request without an output.")
    return last

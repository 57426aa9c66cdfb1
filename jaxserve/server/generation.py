"""What all generating endpoints share: from a request's fields to admitted streams, and back to outputs.

An endpoint turns its body into prompts and SamplingParams, calls ``submit``, and then awaits the whole
answer or returns an EventStream over it. A client that leaves aborts what it asked for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxserve.engine.protocol import EngineClient, Prompt, RequestStream
from jaxserve.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    RequestFailedError,
)
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.outputs import CompletionOutput, RequestOutput
from jaxserve.parsers import ParserNames, ParserSet
from jaxserve.sampling_params import MAX_N, RequestOutputKind, SamplingParams
from jaxserve.tokenizer.interface import Tokenizer

T = TypeVar("T")

MAX_PROMPTS = 1024
"""Prompts in one request."""


@dataclass(frozen=True)
class ServedModel:
    """Under which names the model is served.

    Args:
        names: aliases; the first is reported.
        root: where the model came from.
        created: seconds since the epoch, for /v1/models.
    """

    names: tuple[str, ...]
    root: str
    created: int


class Submission:
    """The admitted requests of one HTTP request, one per prompt. ``aclose`` aborts what has not finished."""

    def __init__(self, active: set[str]) -> None:
        self._active = active
        self._ids: list[str] = []
        self._streams: list[RequestStream] = []

    def add(self, request_id: str, stream: RequestStream) -> None:
        self._ids.append(request_id)
        self._streams.append(stream)
        self._active.add(request_id)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Every output with its prompt's index, as they come.

        Raises:
            RequestFailedError: a step failed while one of the requests was in it.
            EngineDeadError: the engine core died.
        """
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, _checked(output)
            return
        async for index, output in _merge(self._streams):
            yield index, _checked(output)

    async def collect(self) -> list[RequestOutput]:
        """The last output of each prompt, in the prompts' order; its choices are in order and complete."""
        last: list[RequestOutput | None] = [None] * len(self._streams)
        choices: list[dict[int, CompletionOutput]] = [{} for _ in self._streams]
        async for index, output in self.outputs():
            last[index] = output
            choices[index].update((choice.index, choice) for choice in output.outputs)
        results: list[RequestOutput] = []
        for output, by_index in zip(last, choices):
            if output is None:
                raise RequestFailedError("The engine ended the request without an output.")
            output.outputs = [by_index[index] for index in sorted(by_index)]
            results.append(output)
        return results

    async def aclose(self) -> None:
        """Leave every stream; requests that still run are aborted."""
        self._active.difference_update(self._ids)
        await asyncio.gather(*(stream.aclose() for stream in self._streams), return_exceptions=True)


class GenerationService:
    """The engine behind the endpoints.

    Args:
        engine: where requests go.
        model: the names it is served under.
        metrics: where refusals are counted; the engine counts the rest.
        chat_template: a template that replaces the model's own.
        parsers: how the model's tool calls and reasoning are read.
        auto_tool_choice: whether requests may leave it to the model whether to call tools.
    """

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        metrics: EngineMetrics,
        chat_template: str | None = None,
        *,
        parsers: ParserSet | None = None,
        auto_tool_choice: bool = True,
    ) -> None:
        self.engine = engine
        self.model = model
        self._metrics = metrics
        self.chat_template = chat_template
        self.parsers = parsers or ParserSet(ParserNames(), engine.tokenizer)
        self.auto_tool_choice = auto_tool_choice
        self.draining = False
        """True while shutting down: nothing new is admitted."""
        self._active: set[str] = set()

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's tokenizer.

        Raises:
            InvalidRequestError: the server was started without one.
        """
        if self.engine.tokenizer is None:
            raise InvalidRequestError(
                "This server runs without a tokenizer (skip_tokenizer_init): send prompts as token ids."
            )
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.info.max_model_len

    @property
    def num_active(self) -> int:
        """Prompts being answered."""
        return len(self._active)

    def resolve_model(self, name: str | None) -> str:
        """The name to report for a request that asked for ``name``.

        Raises:
            ModelNotFoundError: it is not served here.
        """
        if name is None:
            return self.model.names[0]
        if name not in self.model.names:
            raise ModelNotFoundError(
                f"The model `{name}` does not exist. Valid aliases: {', '.join(self.model.names)}."
            )
        return name

    def sampling_params(
        self,
        requested: Mapping[str, Any],
        *,
        default_max_tokens: int | None,
        max_tokens_param: str = "max_tokens",
        stream: bool = False,
    ) -> SamplingParams:
        """SamplingParams from the request's own fields, then the model's defaults, then OpenAI's.

        Args:
            requested: the fields that the request sets; stop token ids are added to the model's.
            default_max_tokens: OpenAI's default for the endpoint; None is the rest of the context.
            max_tokens_param: how the request spelt ``max_tokens``.
            stream: whether outputs come as differences or once.

        Raises:
            InvalidRequestError: with the parameter's name.
        """
        defaults = self.engine.default_sampling_params()
        values: dict[str, Any] = {"max_tokens": default_max_tokens, **defaults, **requested}
        stop_ids = [*(defaults.get("stop_token_ids") or ()), *(requested.get("stop_token_ids") or ())]
        values["stop_token_ids"] = stop_ids or None
        max_tokens = values["max_tokens"]
        if requested.get("max_tokens") is not None and max_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"{max_tokens_param} is {max_tokens}, but this model's maximum context length is "
                f"{self.max_model_len} tokens; lower it.",
                param=max_tokens_param,
            )
        if stream and requested.get("prompt_logprobs") is not None:
            raise InvalidRequestError(
                "prompt_logprobs is not available with stream=true.", param="prompt_logprobs"
            )
        values["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**values)

    async def submit(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> Submission:
        """Admit one request per prompt, or none of them.

        Raises:
            InvalidRequestError: a prompt's own mistake.
            QueueFullError: too many requests wait, or the server is shutting down.
            EngineDeadError: the engine core died.
        """
        self._check_open()
        _check_choices(len(prompts), params.n)
        submission = Submission(self._active)
        try:
            for index, prompt in enumerate(prompts):
                # Clients choose request ids and may repeat them; the engine's must be unique.
                engine_id = f"{request_id}-{index}-{secrets.token_hex(4)}"
                stream = await self.engine.add_request(
                    prompt,
                    params,
                    request_id=engine_id,
                    priority=priority,
                    cache_salt=cache_salt,
                    add_special_tokens=add_special_tokens,
                )
                submission.add(engine_id, stream)
        except BaseException as error:
            if isinstance(error, QueueFullError):
                self._metrics.record_rejected("queue_full")
            await submission.aclose()
            raise
        return submission

    async def abort_all(self) -> None:
        """End every request that runs, with what it has so far (``finish_reason`` abort)."""
        await self.engine.abort(list(self._active))

    def _check_open(self) -> None:
        if self.draining:
            raise QueueFullError("The server is shutting down.")
        if self.engine.errored is not None:
            raise EngineDeadError(f"The engine has stopped: {self.engine.errored}")


def _check_choices(num_prompts: int, n: int) -> None:
    """Refuse what would fill the memory before it runs: one prompt's limit holds for them all."""
    if num_prompts * n > MAX_N:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={n} make {num_prompts * n} choices; at most {MAX_N} are allowed.",
            param="n",
        )


def _checked(output: RequestOutput) -> RequestOutput:
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise RequestFailedError("The request failed in the engine.")
    return output


async def _merge(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several streams as they come; the first failure ends them all."""
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                queue.put_nowait((index, output))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""What all generating endpoints share: from a request's fields to admitted streams, and back to outputs.

An endpoint turns its body into prompts and SamplingParams, calls ``submit``, and then awaits the whole
answer or returns an EventStream over it. A client that leaves aborts what it asked for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxserve.engine.beam_search import step_params
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
from jaxserve.sampling_params import MAX_N, BeamSearchParams, RequestOutputKind, SamplingParams
from jaxserve.server.beams import BeamRequests, BeamSamplingParams
from jaxserve.tokenizer.interface import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PROMPTS = 1024
"""Prompts in one request."""
BEAM_FIELDS = ("use_beam_search", "length_penalty")
"""Fields that are no sampling parameters."""
BEAM_COMPANIONS = frozenset(
    {
        *BEAM_FIELDS, "n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
        "logprobs", "truncate_prompt_tokens", "truncation_side",
    }
)  # fmt: skip
"""What a beam search honours."""
BEAM_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "min_tokens": (0,), "stop": ([],),
    "stop_token_ids": ([],), "bad_words": ([],), "logit_bias": ({},), "spaces_between_special_tokens": (True,),
}  # fmt: skip
"""Values that ask for nothing and may stand beside it."""


@dataclass(frozen=True)
class ServiceLimits:
    """What requests may ask for, and what answers tell.

    Args:
        max_n: choices of one request, over all its prompts.
        trust_request_chat_template: whether requests may bring a chat template.
        report_cached_tokens: name the cached prompt tokens in usage.
        log_requests: log each request with its prompt.
    """

    max_n: int = MAX_N
    trust_request_chat_template: bool = False
    report_cached_tokens: bool = False
    log_requests: bool = False


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

    reports_cached_tokens = False
    """Whether usage names the prompt tokens that were found in the prefix cache."""

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
        limits: what requests may ask for.
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
        limits: ServiceLimits | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self._metrics = metrics
        self.chat_template = chat_template
        self.parsers = parsers or ParserSet(ParserNames(), engine.tokenizer)
        self.auto_tool_choice = auto_tool_choice
        self.limits = limits or ServiceLimits()
        self.draining = False
        """True while shutting down: nothing new is admitted."""
        self.aborting = False
        """True when what still runs is being ended."""
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
        if requested.get("use_beam_search"):
            return self._beam_params(requested, default_max_tokens, max_tokens_param)
        if requested.get("length_penalty", 1.0) != 1.0:
            raise InvalidRequestError(
                "length_penalty counts in beam search only: set use_beam_search, or remove it.",
                param="length_penalty",
            )
        requested = {name: value for name, value in requested.items() if name not in BEAM_FIELDS}
        defaults = self.engine.default_sampling_params()
        values: dict[str, Any] = {"max_tokens": default_max_tokens, **defaults, **requested}
        stop_ids = [*(defaults.get("stop_token_ids") or ()), *(requested.get("stop_token_ids") or ())]
        values["stop_token_ids"] = stop_ids or None
        self._check_max_tokens(requested.get("max_tokens"), max_tokens_param)
        if stream and requested.get("prompt_logprobs") is not None:
            raise InvalidRequestError(
                "prompt_logprobs is not available with stream=true.", param="prompt_logprobs"
            )
        values["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**values)

    def _check_max_tokens(self, max_tokens: int | None, param: str) -> None:
        if max_tokens is not None and max_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"{param} is {max_tokens}, but this model's maximum context length is "
                f"{self.max_model_len} tokens; lower it.",
                param=param,
            )

    def _beam_params(
        self, requested: Mapping[str, Any], default_max_tokens: int | None, max_tokens_param: str
    ) -> SamplingParams:
        """The parameters of a request for beam search, which takes few of the others: the rest is refused."""
        for name, value in requested.items():
            if name not in BEAM_COMPANIONS and not (name in BEAM_NEUTRAL and value in BEAM_NEUTRAL[name]):
                raise InvalidRequestError(f"{name} cannot be combined with use_beam_search.", param=name)
        max_tokens = requested.get("max_tokens", default_max_tokens)
        self._check_max_tokens(max_tokens, max_tokens_param)
        width = requested.get("n", 1)
        beam = BeamSearchParams(
            beam_width=width,
            max_tokens=self.max_model_len if max_tokens is None else max_tokens,
            ignore_eos=requested.get("ignore_eos", False),
            length_penalty=requested.get("length_penalty", 1.0),
            include_stop_str_in_output=requested.get("include_stop_str_in_output", False),
            skip_special_tokens=requested.get("skip_special_tokens", True),
        )
        step_params(
            beam, len(self.engine.eos_token_ids), self.engine.max_logprobs
        )  # refuses what is too wide
        return BeamSamplingParams(
            n=width,
            max_tokens=beam.max_tokens,
            logprobs=requested.get("logprobs"),
            truncate_prompt_tokens=requested.get("truncate_prompt_tokens"),
            truncation_side=requested.get("truncation_side"),
            output_kind=RequestOutputKind.FINAL_ONLY,
            beam=beam,
        )

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
        self.check_choices(len(prompts), params.n)
        submission = Submission(self._active)
        submission.reports_cached_tokens = self.limits.report_cached_tokens
        try:
            for index, prompt in enumerate(prompts):
                # Clients choose request ids and may repeat them; the engine's must be unique.
                engine_id = f"{request_id}-{index}-{secrets.token_hex(4)}"
                add_request = self.engine.add_request
                if isinstance(params, BeamSamplingParams):
                    add_request = BeamRequests(self.engine, params, lambda: self.aborting).add_request
                stream = await add_request(
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
                self._metrics.record_rejected(error.reason)
            await submission.aclose()
            raise
        if self.limits.log_requests:
            for prompt in prompts:
                logger.info("Request %s: prompt %.2000r, %s", request_id, prompt, params)
        return submission

    async def abort_all(self) -> None:
        """End every request that runs, with what it has so far (``finish_reason`` abort)."""
        self.aborting = True
        await self.engine.abort(list(self._active))

    def _check_open(self) -> None:
        if self.draining:
            raise QueueFullError("The server is shutting down.", reason="draining")
        if self.engine.errored is not None:
            raise EngineDeadError(f"The engine has stopped: {self.engine.errored}")

    def check_choices(self, num_prompts: int, n: int) -> None:
        """Refuse what would fill the memory before it runs: one limit holds for all prompts of a request.

        Raises:
            InvalidRequestError: naming ``n``.
        """
        limit = self.limits.max_n
        if num_prompts * n > limit:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n={n} make {num_prompts * n} choices; at most {limit} are allowed "
                "(--max-n).",
                param="n",
            )


def _checked(output: RequestOutput) -> RequestOutput:
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise RequestFailedError("The request failed in the engine.")
    return output


async def _merge(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of several streams as they come; the first failure ends them all.

    The queue holds one output: what a slow reader has not taken waits in the streams, which merge it.
    """
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

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

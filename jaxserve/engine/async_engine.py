"""AsyncEngine: an engine core in its own process, as async iterators of outputs. What the server runs on."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.core_client import AttachedCore, CoreClient
from jaxserve.engine.front import Front, check_fits, check_priority
from jaxserve.engine.output_processor import OutputProcessor
from jaxserve.engine.output_queue import RequestOutputQueue
from jaxserve.engine.protocol import Prompt
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.metrics.traces import open_tracer
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import EngineCoreOutputs, EngineInfo, SchedulerStats
from jaxserve.tokenizer.interface import Tokenizer

logger = logging.getLogger(__name__)


class AsyncEngine:
    """A ready engine. Every coroutine runs in one event loop; build it with ``from_config`` or ``from_kwargs``.

    Args:
        config: as given, the platform's defaults not filled in.
        client: a core that is ready.
        front: tokenizer and defaults.
        info: what the core resolved.
        records_state: whether the scheduler's state goes into this engine's metrics: of several engines over one
            core only one does that.
        shares_core: whether there are others.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: AttachedCore,
        front: Front,
        info: EngineInfo,
        *,
        records_state: bool = True,
        shares_core: bool = False,
    ) -> None:
        self._config = config
        self._client = client
        self._front = front
        self._info = info
        self._inputs = front.input_processor(config, info)
        self._tracer = open_tracer(config.observability_config.otlp_traces_endpoint)
        self._outputs = OutputProcessor(front.tokenizer, tracer=self._tracer)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats = SchedulerStats()
        self._records_state = records_state
        self._shares_core = shares_core
        client.listen(
            lambda outputs: self._in_loop(self._process, outputs),
            lambda error: self._in_loop(self._die, error),
        )

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """Start the core's process and block until it is ready.

        Raises:
            JaxserveError: what the user asked for cannot be had.
        """
        client = CoreClient()
        try:
            client.start(config)
            front = Front.load(config.model_config)
            return cls(config, client, front, client.wait_ready())
        except BaseException:
            client.kill()
            raise

    @classmethod
    def from_kwargs(cls, model: str = "", **kwargs: Any) -> AsyncEngine:
        """``from_config`` with the engine's arguments spelt out."""
        return cls.from_config(EngineConfig.from_kwargs(model=model, **kwargs))

    # --- what the server reads ------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved while starting."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with ``skip_tokenizer_init``."""
        return self._front.tokenizer

    @property
    def model_type(self) -> str | None:
        """The model's family as ``config.json`` names it, such as ``qwen3``."""
        return self._front.files.config.get("model_type")

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end a sequence."""
        return self._front.eos_token_ids

    @property
    def max_logprobs(self) -> int:
        """The most log probabilities a request may ask for; -1 is the whole vocabulary."""
        return self._config.model_config.max_logprobs

    @property
    def errored(self) -> BaseException | None:
        """Why the engine core died; None while it lives."""
        return self._client.error

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's state after the last step that gave outputs."""
        return self._stats

    @property
    def core_pid(self) -> int | None:
        """Process id of the engine core."""
        return self._client.pid

    def default_sampling_params(self) -> dict[str, Any]:
        """SamplingParams fields from ``generation_config.json`` and ``override_generation_config``."""
        return dict(self._front.default_sampling_params)

    def attach_metrics(self, metrics: EngineMetrics) -> None:
        """Feed ``metrics`` from now on."""
        self._outputs.metrics = metrics

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize, without admitting anything."""
        return self._inputs.encode(text, add_special_tokens=add_special_tokens)

    # --- requests -------------------------------------------------------------------------------------------

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> EngineStream:
        """Validate, tokenize and admit a request.

        Raises:
            InvalidRequestError: the request's own mistake, before anything was admitted.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine core died.
        """
        self._ensure_alive()
        self._use_running_loop()
        self._check_queue(sampling_params.n)
        check_priority(priority, self._config.scheduler_config)
        request = await self._inputs.process_async(
            request_id or f"req-{secrets.token_hex(12)}",
            prompt,
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
        )
        check_fits(request, self._info)
        self._ensure_alive()
        self._check_queue(sampling_params.n, len(request.prompt_token_ids))
        queue = RequestOutputQueue()
        self._outputs.add_request(request, queue)
        self._client.add(request.core_requests)
        return EngineStream(self, request.request_id, queue)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str | None = None, **kwargs: Any
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come. Leaving the loop early aborts the request.

        Args:
            prompt, sampling_params, request_id, kwargs: as ``add_request`` takes them.
        """
        stream = await self.add_request(prompt, sampling_params, request_id=request_id, **kwargs)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def abort(self, request_ids: str | Sequence[str]) -> None:
        """End requests early: their streams end with ``finish_reason`` abort. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        core_ids = self._outputs.abort_requests(ids)
        if core_ids and self.errored is None:
            self._client.abort(core_ids)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._ensure_alive()
        self._client.reset_prefix_cache()

    async def start_profile(self) -> None:
        """Begin a JAX profile of the engine core's process, in the folder ``profiler_dir``.

        Raises:
            InvalidRequestError: the engine was started without one, or a profile runs already.
            EngineDeadError: the engine core died.
        """
        await self._profile(start=True)

    async def stop_profile(self) -> None:
        """End the profile and write it; steps wait meanwhile.

        Raises:
            InvalidRequestError: no profile runs.
            EngineDeadError: the engine core died.
        """
        await self._profile(start=False)

    async def _profile(self, *, start: bool) -> None:
        self._ensure_alive()
        error = await asyncio.wrap_future(self._client.profile(start=start))
        if error is not None:
            raise InvalidRequestError(error, param="profiler_dir")

    def shutdown(self) -> None:
        """End the engine core and everything it started; callable twice, and after the core died."""
        self._client.close()
        self._outputs.fail_all(EngineDeadError("The engine was shut down."))
        self._inputs.close()
        if self._tracer is not None:
            self._tracer.close()

    # --- from the core --------------------------------------------------------------------------------------

    def _ensure_alive(self) -> None:
        if self.errored is not None:
            raise EngineDeadError(str(self.errored))

    def _use_running_loop(self) -> None:
        """The first request's event loop is the one that outputs are handed to."""
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("An AsyncEngine serves one event loop; this is another one.")

    def _in_loop(self, function: Any, argument: Any) -> None:
        """Without a loop yet there is no request that could wait for it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    def _check_queue(self, n: int, num_prompt_tokens: int = 1) -> None:
        """Refuse a request that would wait beyond the limits; one that finds nothing waiting is never refused."""
        config = self._config.scheduler_config
        limit, waiting = config.max_num_queued_reqs, self._num_waiting()
        if limit is not None and waiting and waiting + n > limit:
            raise QueueFullError(
                f"{waiting} requests wait already (max_num_queued_reqs is {limit}). Try again later."
            )
        limit, queued = config.max_num_queued_tokens, self._outputs.num_queued_tokens
        if limit is not None and queued and queued + num_prompt_tokens > limit:
            raise QueueFullError(
                f"Prompts of {queued} tokens wait already (max_num_queued_tokens is {limit}). Try again later.",
                reason="queued_tokens",
            )

    def _num_waiting(self) -> int:
        """Completions that wait, by what the core last told of its batch."""
        waiting = max(0, self._outputs.num_unfinished_completions - self._stats.num_running)
        return max(waiting, self._stats.num_waiting) if self._shares_core else waiting

    def _process(self, outputs: EngineCoreOutputs) -> None:
        processed = self._outputs.process_outputs(outputs.outputs, outputs.timestamp or None)
        if processed.request_ids_to_abort:
            self._client.abort(processed.request_ids_to_abort)
        if outputs.stats is not None:
            self._stats = outputs.stats
            if self._outputs.metrics is not None and self._records_state:
                self._outputs.metrics.record_stats(outputs.stats)

    def _die(self, error: BaseException) -> None:
        self._outputs.fail_all(EngineDeadError(str(error)))


class EngineStream:
    """The outputs of one admitted request."""

    def __init__(self, engine: AsyncEngine, request_id: str, queue: RequestOutputQueue) -> None:
        self.request_id = request_id
        self._engine = engine
        self._queue = queue
        self._finished = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._queue.get()
        if output is None:
            self._finished = True
            raise StopAsyncIteration
        self._finished = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request unless it has finished."""
        if not self._finished:
            self._finished = True
            await self._engine.abort([self.request_id])

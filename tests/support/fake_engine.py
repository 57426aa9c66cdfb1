"""FakeEngine: an EngineClient without a model. Tokens are bytes, the output is the alphabet, over and over.

One background task steps all running requests together, one token each, as the real engine does. Tests
script what goes wrong: a step that fails a request, an engine that dies, a full queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.engine.protocol import Prompt
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestFailedError
from jaxserve.metrics.engine_metrics import EngineMetrics, FinishedRequest
from jaxserve.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.step import EngineInfo, SchedulerStats

BOS, EOS, VOCAB_SIZE = 256, 257, 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class FakeTokenizer:
    """One token per byte of UTF-8, and two special ones."""

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS
    special_token_ids = frozenset({BOS, EOS})
    chat_template: str | None = CHAT_TEMPLATE
    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}  # noqa: RUF012

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        specials = {BOS: b"", EOS: b""} if skip_special_tokens else {BOS: b"<s>", EOS: b"</s>"}
        parts = [specials.get(token) if token > 255 else bytes([token]) for token in token_ids]
        return b"".join(part or b"" for part in parts).decode(errors="replace")

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(token) if token < 256 else "" for token in token_ids]


@dataclass
class Admitted:
    """A request as it reached the engine."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None
    arrival_time: float = field(default_factory=time.monotonic)


class FakeStream:
    """The outputs of one request. What the reader has not taken yet is merged, as the real engine does."""

    def __init__(self, engine: FakeEngine, admitted: Admitted) -> None:
        self.admitted = admitted
        self.num_tokens = 0
        self.first_token_time: float | None = None
        self._engine = engine
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self._ready = asyncio.Event()
        self._first = True
        self._ended = False
        self.texts = [""] * admitted.params.n
        self.token_ids: list[list[int]] = [[] for _ in range(admitted.params.n)]
        self.all_logprobs: list[list[PositionLogprobs]] = [[] for _ in range(admitted.params.n)]

    # --- the engine's side ----------------------------------------------------------------------------

    def put(self, output: RequestOutput) -> None:
        if self._pending is None:
            self._pending = output
        else:
            _merge(self._pending, output)
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._ready.set()

    # --- the server's side ----------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        while self._pending is None:
            if self._error is not None:
                self._ended = True
                raise self._error
            self._ready.clear()
            await self._ready.wait()
        output, self._pending = self._pending, None
        self._ended = output.finished
        return output

    async def aclose(self) -> None:
        self._ended = True
        await self._engine.abort([self.admitted.request_id])


class FakeEngine:
    """A scripted engine.

    Args:
        max_model_len: prompt and output, in tokens.
        step_seconds: how long a step takes; 0 yields to the loop between steps.
        defaults: what ``default_sampling_params`` returns.
        max_running: requests that may run before QueueFullError.
        tokenizer: False serves token ids only.
        fail_after: tokens after which a request fails, if its prompt holds the text ``fail``.
        output: the text that outputs cycle through.
        once: end with ``stop`` after the whole output.
    """

    def __init__(
        self,
        *,
        max_model_len: int = 1024,
        step_seconds: float = 0.0,
        defaults: Mapping[str, Any] | None = None,
        max_running: int = 1 << 30,
        tokenizer: bool = True,
        fail_after: int = 3,
        output: str = "abcdefghijklmnopqrstuvwxyz",
        once: bool = False,
    ) -> None:
        self.info = EngineInfo(max_model_len, VOCAB_SIZE, 16, 100, 1600, max_model_len - 1, 1, "fake")
        self.tokenizer = FakeTokenizer() if tokenizer else None
        self.model_type: str | None = None
        self.errored: BaseException | None = None
        self.admitted: list[Admitted] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.shut_down = False
        self.num_resets = 0
        self.max_logprobs = 20
        self.eos_token_ids = [EOS]
        self.sampled_rank = 1
        self.step_seconds = step_seconds
        self._defaults = dict(defaults or {})
        self._max_running = max_running
        self._fail_after = fail_after
        self._output = output.encode()
        self._once = once
        self._running: dict[str, FakeStream] = {}
        self._stepper: asyncio.Task[None] | None = None
        self._metrics: EngineMetrics | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def default_sampling_params(self) -> dict[str, Any]:
        return dict(self._defaults)

    def attach_metrics(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return FakeTokenizer().encode(text, add_special_tokens=add_special_tokens)

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> FakeStream:
        if self.errored is not None:
            raise EngineDeadError(str(self.errored))
        text = prompt if isinstance(prompt, str) else None
        ids = self.encode(text, add_special_tokens=add_special_tokens) if text is not None else list(prompt)
        self._check(ids, sampling_params)
        if self.num_running >= self._max_running:
            raise QueueFullError(f"{self.num_running} requests wait already; try again later.")
        assert request_id is not None
        assert request_id not in self._running, "request ids are unique"
        admitted = Admitted(request_id, text, ids, sampling_params, priority, cache_salt)
        self.admitted.append(admitted)
        self._running[request_id] = stream = FakeStream(self, admitted)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.ensure_future(self._run())
        return stream

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            stream = self._running.pop(request_id, None)
            if stream is not None:
                self.aborted.append(request_id)
                stream.put(self._snapshot(stream, "abort"))

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def start_profile(self) -> None:
        raise InvalidRequestError("Profiling is off.", param="profiler_dir")

    async def stop_profile(self) -> None:
        raise InvalidRequestError("Profiling is off.", param="profiler_dir")

    def die(self, reason: str = "the core was killed") -> None:
        """End the engine: every stream fails, nothing is admitted any more."""
        self.errored = EngineDeadError(reason)
        for stream in self._running.values():
            stream.fail(EngineDeadError(reason))
        self._running.clear()

    def shutdown(self) -> None:
        self.shut_down = True

    # --- stepping -------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._running and self.errored is None:
            await asyncio.sleep(self.step_seconds)
            step_tokens = len(self._running)
            for request_id, stream in list(self._running.items()):
                if self._step(stream):
                    self._running.pop(request_id, None)
                    self.finished.append(request_id)
            if self._metrics is not None:
                stats = SchedulerStats(num_running=self.num_running, step_tokens=step_tokens)
                self._metrics.record_stats(stats)

    def _step(self, stream: FakeStream) -> bool:
        """One token for each choice of a request; whether that ended it."""
        params = stream.admitted.params
        prompt = stream.admitted.prompt or ""
        if "fail" in prompt and stream.num_tokens >= self._fail_after:
            stream.fail(RequestFailedError('A step failed: File "/srv/x.py", line 3, in f: out of memory'))
            return True
        choices = [self._choice(stream, index) for index in range(params.n)]
        stream.num_tokens += 1
        if stream.num_tokens == 1:
            stream.first_token_time = time.monotonic()
        finished = choices[0].finish_reason is not None
        if params.output_kind is RequestOutputKind.DELTA:
            stream.put(self._output_of(stream, choices, finished))
        elif finished:
            stream.put(self._snapshot(stream, choices[0].finish_reason, choices[0].stop_reason))
        if finished:
            self._record_finished(stream, choices[0].finish_reason or "")
        return finished

    def _choice(self, stream: FakeStream, index: int) -> CompletionOutput:
        params, position = stream.admitted.params, stream.num_tokens
        token = self._output[(position + index) % len(self._output)]
        text = bytes([token]).decode(errors="replace")
        stream.token_ids[index].append(token)
        stream.texts[index] += text
        choice = CompletionOutput(index, text, [token])
        if params.logprobs is not None:
            choice.logprobs = [self._position(token, params.logprobs)]
            stream.all_logprobs[index] += choice.logprobs
        choice.finish_reason, choice.stop_reason = self._finish(stream, index, token)
        return choice

    def _finish(self, stream: FakeStream, index: int, token: int) -> tuple[str | None, int | str | None]:
        params = stream.admitted.params
        if self._once and stream.num_tokens + 1 == len(self._output):
            return "stop", None
        for stop in params.stop or ():
            if stream.texts[index].endswith(stop):
                return "stop", stop
        if token in (params.stop_token_ids or ()):
            return "stop", token
        room = self.info.max_model_len - len(stream.admitted.prompt_token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        return ("length", None) if stream.num_tokens + 1 >= limit else (None, None)

    def _position(self, token: int, count: int) -> PositionLogprobs:
        """The chosen token with rank ``sampled_rank``, and the ``count`` most likely ones."""
        others = [other for other in range(65, 65 + 26) if other != token]
        ranked = [*others[: self.sampled_rank - 1], token, *others[self.sampled_rank - 1 :]]
        logprobs = {
            other: Logprob(-0.5 * rank, rank, bytes([other]).decode(errors="replace"))
            for rank, other in enumerate(ranked, 1)
        }
        return {token: logprobs[token], **{other: logprobs[other] for other in ranked[:count]}}

    def _output_of(
        self, stream: FakeStream, choices: list[CompletionOutput], finished: bool
    ) -> RequestOutput:
        admitted = stream.admitted
        return RequestOutput(
            admitted.request_id,
            admitted.prompt,
            admitted.prompt_token_ids,
            self._prompt_logprobs(stream),
            choices,
            finished,
            num_cached_tokens=len(admitted.prompt_token_ids) // 16 * 16,
        )

    def _snapshot(
        self, stream: FakeStream, finish_reason: str | None, stop_reason: int | str | None = None
    ) -> RequestOutput:
        delta = stream.admitted.params.output_kind is RequestOutputKind.DELTA
        choices = [
            CompletionOutput(
                index,
                "" if delta else stream.texts[index],
                [] if delta else list(stream.token_ids[index]),
                None,
                None if delta else (stream.all_logprobs[index] or None),
                finish_reason,
                stop_reason,
            )
            for index in range(stream.admitted.params.n)
        ]
        return self._output_of(stream, choices, True)

    def _prompt_logprobs(self, stream: FakeStream) -> list[PositionLogprobs | None] | None:
        count = stream.admitted.params.prompt_logprobs
        if count is None:
            return None
        return [None, *(self._position(token, count) for token in stream.admitted.prompt_token_ids[1:])]

    def _record_finished(self, stream: FakeStream, reason: str) -> None:
        if self._metrics is None:
            return
        admitted, now = stream.admitted, time.monotonic()
        times = RequestMetrics(
            admitted.arrival_time, admitted.arrival_time, stream.first_token_time, now, stream.num_tokens
        )
        self._metrics.record_finished(
            FinishedRequest(reason, len(admitted.prompt_token_ids), stream.num_tokens, times=times)
        )

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        if not ids:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        if max(ids) >= VOCAB_SIZE:
            raise InvalidRequestError(f"Token id {max(ids)} is out of vocabulary.", param="prompt")
        if len(ids) >= self.info.max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {self.info.max_model_len} tokens. However, your "
                f"request has {len(ids)} input tokens. Please reduce the length of the input prompt.",
                param="input_tokens",
                code="context_length_exceeded",
            )
        if (params.logprobs or 0) > self.max_logprobs:
            raise InvalidRequestError(
                f"logprobs is {params.logprobs}; at most {self.max_logprobs} are allowed.", param="logprobs"
            )


def _merge(pending: RequestOutput, output: RequestOutput) -> None:
    for before, after in zip(pending.outputs, output.outputs):
        before.text += after.text
        before.token_ids += after.token_ids
        if after.logprobs:
            before.logprobs = (before.logprobs or []) + after.logprobs
        before.finish_reason, before.stop_reason = after.finish_reason, after.stop_reason
    pending.finished = output.finished

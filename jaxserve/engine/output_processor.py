"""OutputProcessor: what the engine core adds to its requests becomes text, stops and RequestOutputs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.engine.input_processor import ProcessedRequest
from jaxserve.engine.output_queue import RequestOutputQueue
from jaxserve.engine.request_state import CompletionState, RequestState
from jaxserve.errors import InvalidRequestError, JaxserveError, RequestFailedError
from jaxserve.metrics.traces import TracedRequest, client_trace
from jaxserve.outputs import RequestOutput
from jaxserve.step import EngineCoreOutput
from jaxserve.tokenizer.interface import Tokenizer
from jaxserve.tokenizer.pieces import pieces_of

if TYPE_CHECKING:
    from jaxserve.metrics.engine_metrics import EngineMetrics
    from jaxserve.metrics.traces import RequestTracer


class ProcessedOutputs(NamedTuple):
    """What a step's outputs came to.

    ``results`` and ``failures`` concern requests without a queue; the others' readers were woken.
    """

    results: list[RequestOutput]
    request_ids_to_abort: list[str]
    """Requests of the core that ended here (a stop string, a failed sibling): the core must drop them."""
    failures: list[tuple[str, JaxserveError]]


class OutputProcessor:
    """Keeps the state of every running request. All calls come from one thread (or event loop).

    Args:
        tokenizer: None gives token ids only.
        metrics: fed with prompts, tokens and finished requests; may be set later.
        tracer: fed with finished requests.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        metrics: EngineMetrics | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.metrics = metrics
        self.tracer = tracer
        self._pieces = None if tokenizer is None else pieces_of(tokenizer)
        self._requests: dict[str, RequestState] = {}
        self._completions: dict[str, CompletionState] = {}
        """By the core's request id."""
        self._queued_tokens: dict[str, int] = {}
        """Prompt tokens of the requests that have no token yet, by request id."""
        self.num_queued_tokens = 0
        """Their sum."""
        self._step_tokens = 0
        self._step_gaps: dict[float, int] = {}
        """What the metrics are told after a step: its tokens, and times between tokens with their numbers."""

    @property
    def num_unfinished(self) -> int:
        """Requests that run (n completions count once)."""
        return len(self._requests)

    @property
    def num_unfinished_completions(self) -> int:
        """Completions that run: what the core counts."""
        return len(self._completions)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: ProcessedRequest, queue: RequestOutputQueue | None = None) -> None:
        """Begin to follow a request; call before the core can answer.

        Args:
            request: from the input processor.
            queue: where its outputs go; None returns them from ``process_outputs``.

        Raises:
            InvalidRequestError: a request with this id is running.
        """
        taken = request.request_id in self._requests
        if taken or any(core.request_id in self._completions for core in request.core_requests):
            raise InvalidRequestError(
                f"request_id {request.request_id!r} is in use by a request that is still running.",
                param="request_id",
            )
        state = RequestState(request, self._pieces, queue)
        if self.tracer is not None:
            state.parent_trace = client_trace.get()
        if queue is not None:
            queue.attach(state)
        self._requests[state.request_id] = state
        self._queued_tokens[state.request_id] = len(state.prompt_token_ids)
        self.num_queued_tokens += len(state.prompt_token_ids)
        for completion in state.completions:
            self._completions[completion.core_id] = completion

    def process_outputs(
        self, outputs: Sequence[EngineCoreOutput], timestamp: float | None = None
    ) -> ProcessedOutputs:
        """Take one step's outputs. Outputs of requests that ended here meanwhile are dropped.

        Args:
            outputs: from the core, in order.
            timestamp: when the step ended, of ``time.monotonic()``; None is now.
        """
        now = time.monotonic() if timestamp is None else timestamp
        processed = ProcessedOutputs([], [], [])
        changed: list[RequestState] = []
        completions, traced = self._completions, self.tracer is not None
        num_tokens = num_rows = 0
        last = -1.0  # when the rows counted in num_rows had their previous tokens: nearly always all at once
        for output in outputs:
            completion = completions.get(output.request_id)
            if completion is None:
                continue
            state = completion.request
            ids = output.new_token_ids
            if (
                output.finish_reason is None
                and completion.plain
                and ids
                and completion.num_tokens
                and output.prompt_logprobs is None
                and output.error is None
                and not traced
            ):  # ``_append``, written out for what nearly all outputs are
                num_tokens += len(ids)
                if completion.last_token_time != last:
                    self._count_gaps(now - last, num_rows)
                    last, num_rows = completion.last_token_time, 0
                num_rows += 1
                times = state.metrics
                completion.last_token_time = times.last_token_time = now
                times.num_generation_tokens += len(ids)
                if output.num_preemptions > times.num_preemptions:
                    times.num_preemptions = output.num_preemptions
                completion.append_plain(ids)
                if state.streams and not state.changed:
                    state.changed = True
                    changed.append(state)
                continue
            if output.error is not None:
                self._fail(completion, output, processed)
                continue
            if self._append(completion, output, now):
                processed.request_ids_to_abort.append(output.request_id)
            if not state.changed and (state.num_running == 0 or (ids and state.streams)):
                state.changed = True
                changed.append(state)
        self._step_tokens += num_tokens
        self._count_gaps(now - last, num_rows)
        if self._step_tokens:
            if self.metrics is not None:
                self.metrics.record_step_tokens(self._step_tokens, self._step_gaps)
            self._step_tokens, self._step_gaps = 0, {}
        for state in changed:
            if state.queue is not None:
                state.queue.notify()
            elif state.request_id not in (failed for failed, _ in processed.failures):
                processed.results.append(state.take())
        return processed

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests early: their readers get a last output with ``finish_reason`` abort.

        Returns:
            The core's ids of what still ran; the core must drop them. Unknown ids are ignored.
        """
        core_ids: list[str] = []
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is None:
                continue
            for completion in state.completions:
                if completion.finish_reason is None:
                    completion.abort()
                    core_ids.append(completion.core_id)
                    self._finish(completion)
            state.changed = True
            if state.queue is not None:
                state.queue.notify()
        return core_ids

    def fail_all(self, error: BaseException) -> None:
        """Raise ``error`` to every reader and forget all requests: the core died."""
        states, self._requests = list(self._requests.values()), {}
        self._completions = {}
        self._queued_tokens, self.num_queued_tokens = {}, 0
        for state in states:
            if state.queue is not None:
                state.queue.fail(error)

    # --- its parts -----------------------------------------------------------------------------------------

    def _append(self, completion: CompletionState, output: EngineCoreOutput, now: float) -> bool:
        """Take one output; True if a stop string ended it while the core would go on."""
        state = completion.request
        if output.new_token_ids:
            self._record_tokens(completion, output, now)
        if output.prompt_logprobs:
            state.add_prompt_logprobs(output.prompt_logprobs)
        if output.num_preemptions > state.metrics.num_preemptions:
            state.metrics.num_preemptions = output.num_preemptions
        if self.tracer is None:
            stopped = completion.append(output)
        else:
            began = time.perf_counter()
            stopped = completion.append(output)
            state.metrics.detokenize_seconds += time.perf_counter() - began
        if completion.finish_reason is not None:
            self._finish(completion)
        return stopped

    def _record_tokens(self, completion: CompletionState, output: EngineCoreOutput, now: float) -> None:
        state, metrics = completion.request, self.metrics
        times = state.metrics
        num_tokens = len(output.new_token_ids)
        times.num_generation_tokens += num_tokens
        if times.first_token_time is None:
            times.first_token_time = now
            times.first_scheduled_time = output.first_scheduled_time
            state.num_cached_tokens = output.num_cached_tokens
            self._unqueue(state.request_id)
            if metrics is not None:
                waited = now - times.arrival_time
                metrics.record_prompt(len(state.prompt_token_ids), output.num_cached_tokens, waited)
        self._step_tokens += num_tokens
        if completion.num_tokens:
            self._count_gaps(now - completion.last_token_time, 1)
        completion.last_token_time = times.last_token_time = now

    def _count_gaps(self, seconds: float, count: int) -> None:
        """So many completions have new tokens, ``seconds`` after their previous ones."""
        if count:
            self._step_gaps[seconds] = self._step_gaps.get(seconds, 0) + count

    def _unqueue(self, request_id: str) -> None:
        self.num_queued_tokens -= self._queued_tokens.pop(request_id, 0)

    def _finish(self, completion: CompletionState) -> None:
        state = completion.request
        del self._completions[completion.core_id]
        state.num_running -= 1
        if state.num_running == 0:
            del self._requests[state.request_id]
            self._unqueue(state.request_id)
            self._record_finished(state, completion.finish_reason or "error")

    def _fail(
        self, completion: CompletionState, output: EngineCoreOutput, processed: ProcessedOutputs
    ) -> None:
        """One completion failed: the request fails, and its other completions are dropped."""
        state = completion.request
        error: JaxserveError
        if output.invalid_param is not None:
            error = InvalidRequestError(output.error or "", param=output.invalid_param or None)
        else:
            error = RequestFailedError(f"Request {state.request_id!r} failed: {output.error}")
        running = [c.core_id for c in state.completions if c.finish_reason is None]
        for core_id in running:
            del self._completions[core_id]
        processed.request_ids_to_abort.extend(core_id for core_id in running if core_id != completion.core_id)
        del self._requests[state.request_id]
        self._unqueue(state.request_id)
        if state.queue is not None:
            state.queue.fail(error)
        else:
            processed.failures.append((state.request_id, error))
        self._record_finished(state, "error")

    def _record_finished(self, state: RequestState, finish_reason: str) -> None:
        if self.tracer is not None:
            self._trace(self.tracer, state, finish_reason)
        if self.metrics is None:
            return
        from jaxserve.metrics.engine_metrics import FinishedRequest

        lengths = [completion.num_tokens for completion in state.completions]
        self.metrics.record_finished(
            FinishedRequest(
                finish_reason=finish_reason,
                num_prompt_tokens=len(state.prompt_token_ids),
                num_generation_tokens=sum(lengths),
                max_num_generation_tokens=max(lengths),
                num_cached_tokens=state.num_cached_tokens,
                n=len(state.completions),
                max_tokens=state.sampling_params.max_tokens,
                times=state.metrics,
            )
        )

    def _trace(self, tracer: RequestTracer, state: RequestState, finish_reason: str) -> None:
        tracer.record(
            TracedRequest(
                request_id=state.request_id,
                model="" if self.metrics is None else self.metrics.model_name,
                params=state.sampling_params,
                parent=state.parent_trace,
                times=state.metrics,
                ended=time.monotonic(),
                # A failed request's other completions never got one of their own.
                finish_reasons=[c.finish_reason or finish_reason for c in state.completions],
                num_prompt_tokens=len(state.prompt_token_ids),
                num_cached_tokens=state.num_cached_tokens,
                num_generation_tokens=sum(c.num_tokens for c in state.completions),
            )
        )

"""EngineCore: the step loop. Schedule, dispatch, read; it knows neither text nor HTTP nor JAX."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Protocol

from jaxserve.config import EngineConfig
from jaxserve.errors import UnsupportedError
from jaxserve.request import Request
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.step import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    ModelRunner,
    ModelRunnerOutput,
    PendingStep,
    SchedulerOutput,
)
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.reasoning_gate import constraint_of
from jaxserve.structured_output.request_grammar import MaskFiller

logger = logging.getLogger(__name__)

GRAMMAR_POLL_SECONDS = 0.002
"""How long a step without any work waits for a grammar: new requests are looked for in between."""

STEP_FAILED = "The engine failed in a step that held this request. The server goes on; try again."


class Profiler(Protocol):
    """Writes what the device and the host do in between to a folder."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class EngineCore:
    """One scheduler and one runner. One thread calls everything.

    Central idea: with asynchronous scheduling two steps are in flight. The next one is scheduled and dispatched
    before the last one's tokens are read, so the device never waits for the host.

    Args:
        config: with the platform's defaults filled in.
        runner: initialized here.
        grammars: compiles what constrains outputs; None takes no such requests.
        profiler: None refuses profiles.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        grammars: GrammarCompiler | None = None,
        profiler: Profiler | None = None,
    ) -> None:
        started = time.monotonic()
        self.runner = runner
        self.grammars = grammars
        self._profiler = profiler
        self._profiles = False
        self._mask_filler = None if grammars is None else MaskFiller(grammars)
        info = runner.initialize()
        self.scheduler = Scheduler(
            config.scheduler_config,
            config.cache_config,
            info.kv_cache_groups,
            info.num_blocks,
            info.block_size,
            info.max_model_len,
            self._mask_filler,
            info.data_parallel_size,
            info.separate_paths,
            info.bursts,
            info.step_sizes,
        )
        rank_tokens = (info.num_blocks - 1) * info.block_size  # a request is on one rank
        longest = [info.max_model_len - 1, rank_tokens]
        if not config.scheduler_config.enable_chunked_prefill:
            longest.append(config.scheduler_config.max_num_batched_tokens or 0)
        self._depth = 2 if config.scheduler_config.async_scheduling else 1
        self._in_flight: deque[tuple[SchedulerOutput, PendingStep, float]] = deque()
        """Steps, and when they were dispatched."""
        self._last_ready_at = self._waited = self._device_seconds = 0.0
        self._padded_tokens = self._padding_tokens = 0
        self._expert_imbalance = 0.0
        self.info = EngineInfo(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            block_size=info.block_size,
            num_blocks=info.num_blocks * info.data_parallel_size,
            kv_cache_tokens=rank_tokens * info.data_parallel_size,
            max_prompt_tokens=min(longest),
            num_programs=info.num_programs,
            device=info.device,
            startup_seconds={"total": time.monotonic() - started},
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run here.
            QueueFullError: too many requests wait.
        """
        params = request.sampling_params
        grammar = None
        if self.grammars is not None:
            grammar = constraint_of(self.grammars, params, self.info.vocab_size)
        elif params.structured_outputs is not None or params.reasoning is not None:
            name = "reasoning" if params.structured_outputs is None else "structured_outputs"
            raise UnsupportedError(f"{name} is not supported by this engine.", param=name)
        self.scheduler.add_request(Request(request, self.info.max_model_len, grammar))

    def abort(self, request_ids: list[str]) -> None:
        """End requests; no output follows."""
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> EngineCoreOutputs:
        """Dispatch the next step, then read the oldest one if enough are in flight (or nothing was dispatched)."""
        outputs: list[EngineCoreOutput] = []
        began = time.monotonic()
        self._waited = self._device_seconds = 0.0
        self._padded_tokens = self._padding_tokens = 0
        self._expert_imbalance = 0.0
        step = self.scheduler.schedule(began)
        dispatched = bool(step.num_scheduled_tokens)
        if not dispatched and not self._in_flight:
            self.scheduler.wait_for_grammar(GRAMMAR_POLL_SECONDS)
            self._waited += time.monotonic() - began
        try:
            if dispatched:
                self._in_flight.append((step, self.runner.execute(step), time.monotonic()))
            read = None
            if self._in_flight and (len(self._in_flight) >= self._depth or not dispatched):
                read = self._read_oldest()
        except Exception:
            logger.exception("A step failed; its requests fail with it")
            outputs = self._fail_in_flight(step if dispatched else None)
        else:
            if read is not None:
                # Not contained: an error in here leaves the scheduler's own state in doubt, and the engine ends.
                outputs = self.scheduler.update_from_output(*read)
        outputs += self.scheduler.take_outputs()
        stats = self.scheduler.stats()
        stats.num_compilations = self.runner.num_compilations()
        now = time.monotonic()
        stats.step_host_seconds, stats.step_device_seconds = now - began - self._waited, self._device_seconds
        stats.step_padded_tokens, stats.step_padding_tokens = self._padded_tokens, self._padding_tokens
        stats.step_expert_imbalance = self._expert_imbalance
        return EngineCoreOutputs(outputs, stats, now)

    def state(self) -> EngineCoreOutputs:
        """The state now, without a step: after the last request was aborted none follows."""
        stats = self.scheduler.stats()
        stats.num_compilations, stats.step_tokens = self.runner.num_compilations(), 0
        return EngineCoreOutputs([], stats, time.monotonic())

    def _read_oldest(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        step, pending, dispatched_at = self._in_flight[0]
        asked_at = time.monotonic()
        result = pending.result()
        ready_at = time.monotonic()
        self._waited += ready_at - asked_at
        # The device begins a step when it has it and the last one is done; it may have ended before it was asked.
        self._device_seconds = ready_at - max(dispatched_at, self._last_ready_at)
        self._last_ready_at = ready_at
        self._expert_imbalance = result.expert_imbalance
        if result.num_padded_tokens:
            self._padded_tokens = result.num_padded_tokens
            self._padding_tokens = result.num_padded_tokens - step.total_num_scheduled_tokens
        self._in_flight.popleft()
        return step, result

    def _fail_in_flight(self, newest: SchedulerOutput | None) -> list[EngineCoreOutput]:
        """Fail the requests of every step in flight: they share the device's state, which is made anew.

        Running requests that were in none of these steps lose their cached keys and values too, and fail likewise;
        waiting ones go on.
        """
        steps = [step for step, _, _ in self._in_flight]
        if newest is not None and newest not in steps:
            steps.append(newest)  # it never got as far as being dispatched
        self._in_flight.clear()
        outputs: list[EngineCoreOutput] = []
        for step in steps:
            failed = dict.fromkeys(step.num_scheduled_tokens, STEP_FAILED)
            outputs += self.scheduler.update_from_output(step, ModelRunnerOutput(step.step_id, failed=failed))
        outputs += self.scheduler.fail_requests(self.scheduler.running_request_ids(), STEP_FAILED)
        self.scheduler.reset_prefix_cache()
        self.runner.recover()
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.scheduler.reset_prefix_cache()

    def profile(self, *, start: bool) -> str | None:
        """Begin a profile, or end it and write it; what keeps it from that, or None."""
        if self._profiler is None:
            return "Profiling is off: start the engine with --profiler-dir FOLDER."
        if self._profiles == start:
            return "A profile is running already." if start else "No profile is running."
        try:
            self._profiler.start() if start else self._profiler.stop()
        except Exception as error:  # a full disk must not end the engine
            logger.exception("The profile failed")
            self._profiles = False
            return f"The profile failed: {error}"
        self._profiles = start
        return None

    def close(self) -> None:
        """Free the device's memory. Nothing may be called afterwards."""
        self._in_flight.clear()
        if self.grammars is not None and self._mask_filler is not None:
            self._mask_filler.close()
            self.grammars.close()
        self.runner.close()


def rejected(request_id: str, message: str) -> EngineCoreOutput:
    """The output of a request that the core could not admit."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=message)

"""LLM: offline generation in this process. Give it all prompts at once; it batches them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, cast

import numpy as np
from tqdm.auto import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine.beam_search import BeamSearch, next_logprobs, step_params
from jaxserve.engine.core import EngineCore
from jaxserve.engine.factory import create_core
from jaxserve.engine.front import Front, check_fits, check_priority, read_chat_template
from jaxserve.engine.garbage import no_full_collections
from jaxserve.engine.input_processor import InputProcessor, ProcessedRequest
from jaxserve.engine.interactive import drop_failed_calls, drop_replaced
from jaxserve.engine.output_processor import OutputProcessor, ProcessedOutputs
from jaxserve.engine.protocol import Prompt
from jaxserve.errors import (
    EngineDeadError,
    InvalidRequestError,
    JaxserveError,
    OutOfMemoryError,
    RequestFailedError,
)
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.metrics.snapshot import Metric
from jaxserve.metrics.traces import RequestTracer, open_tracer
from jaxserve.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from jaxserve.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxserve.step import EngineInfo
from jaxserve.tokenizer.chat_template import render, template_text
from jaxserve.tokenizer.interface import Tokenizer
from jaxserve.tokenizer.prompted_tools import in_messages, takes_tools

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model in this process.

    Args:
        model: Hugging Face folder, hub id, or ``.gguf`` file; '' is the packaged SmolLM2.
        kwargs: any engine argument (``max_model_len``, ``max_num_seqs``, …): the flags of ``jaxserve serve`` with
            underscores.

    Raises:
        JaxserveError: what was asked for cannot be had.

    Its memory on the device is freed when nothing refers to it any more, as after ``del llm``; ``close``, or its use
    as a context manager, frees it whoever still does.
    """

    _alive: ClassVar[weakref.WeakKeyDictionary[LLM, str]] = weakref.WeakKeyDictionary()
    """Those that hold memory, and their models: for the message of one that finds none."""

    def __init__(self, model: str = "", **kwargs: Any) -> None:
        self._config = EngineConfig.from_kwargs(model=model, **kwargs)
        tracer = open_tracer(self._config.observability_config.otlp_traces_endpoint)
        self._front = Front.load(self._config.model_config)
        drop_failed_calls()
        drop_replaced(inspect.currentframe(), LLM)
        try:
            self._core = create_core(self._config)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{error}{_others_hint(sorted(LLM._alive.values()))}", param=error.param
            ) from None
        self._inputs = self._front.input_processor(self._config, self._core.info, self._core.grammars)
        self._release = weakref.finalize(self, _release, self._core, self._inputs, tracer)
        self._release.atexit = False  # the process's end frees everything
        LLM._alive[self] = self._config.model_config.model or "SmolLM2"
        info = self._core.info
        self._metrics = EngineMetrics(self._config.model_config.model or "SmolLM2", info.max_model_len)
        self._outputs = OutputProcessor(self._front.tokenizer, metrics=self._metrics, tracer=tracer)
        self._counter = itertools.count()
        self._lock = threading.RLock()
        self._closed = False
        self._dead: BaseException | None = None
        """What broke the engine core; nothing runs after it."""
        self._enqueued: list[str] = []
        """Ids of ``enqueue`` that ``wait_for_completion`` has not returned."""
        self._finished: dict[str, RequestOutput | JaxserveError] = {}
        """What came of enqueued requests while others were waited for."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: one prompt or a list: text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            sampling_params: one for all, or one a prompt; None takes the model's defaults.
            use_tqdm: show a progress bar.
            priority: one number a prompt, lower first (with ``scheduling_policy="priority"``).

        Returns:
            One output a prompt, in their order.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was run.
            RequestFailedError: a step failed.
        """
        requests = self._process(prompts, sampling_params, priority)
        ids = [request.request_id for request in requests]
        with self._lock, _interrupts_between_steps() as check_interrupt:
            finished = self._run_all(requests, use_tqdm, check_interrupt)
        return [finished[request_id] for request_id in ids]

    def _process(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[ProcessedRequest]:
        """Validated requests, one a prompt; nothing is admitted yet."""
        self._ensure_open()
        many = _as_prompts(prompts)
        params = _per_prompt("sampling_params", sampling_params, len(many))
        priorities = _per_prompt("priority", priority, len(many))
        for rank in priorities:
            check_priority(rank or 0, self._config.scheduler_config)
        requests = [
            self._inputs.process(
                str(next(self._counter)), prompt, _final_only(param or self.get_default_sampling_params()),
                priority=rank or 0,
            )
            for prompt, param, rank in zip(many, params, priorities, strict=True)
        ]  # fmt: skip
        for request in requests:
            check_fits(request, self._core.info)
        return requests

    def _run_all(
        self, requests: list[ProcessedRequest], use_tqdm: bool, check_interrupt: Callable[[], None]
    ) -> dict[str, RequestOutput]:
        """Admit and run; whatever ends it early aborts what still runs."""
        ids = [request.request_id for request in requests]
        try:
            self._admit(requests)
            return self._run(ids, use_tqdm, check_interrupt)
        except BaseException:  # KeyboardInterrupt too: the engine stays usable
            self._abort(ids)
            raise

    def _admit(self, requests: list[ProcessedRequest]) -> None:
        for request in requests:
            self._outputs.add_request(request)
            for core_request in request.core_requests:
                self._core.add_request(core_request)

    def _abort(self, request_ids: list[str]) -> None:
        core_ids = self._outputs.abort_requests(request_ids)
        if self._dead is None:
            self._core.abort(core_ids)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Admit prompts without running them; ``wait_for_completion`` runs them all.

        Args:
            prompts, sampling_params, priority: as ``generate`` takes them.

        Returns:
            One request id a prompt.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing was admitted.
        """
        requests = self._process(prompts, sampling_params, priority)
        ids = [request.request_id for request in requests]
        with self._lock:
            try:
                self._admit(requests)
            except BaseException:
                self._abort(ids)
                raise
            self._enqueued += ids
        return ids

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Run all that was enqueued.

        Returns:
            One output a prompt, in the order in which they were enqueued.

        Raises:
            RequestFailedError: a step failed; what else was enqueued is aborted.
        """
        self._ensure_open()
        with self._lock, _interrupts_between_steps() as check_interrupt:
            ids, self._enqueued = self._enqueued, []
            before = {request_id: self._finished.pop(request_id, None) for request_id in ids}
            waiting = [request_id for request_id, result in before.items() if result is None]
            try:
                finished = {**before, **self._run(waiting, use_tqdm, check_interrupt)}
            except BaseException:
                self._abort(waiting)
                raise
        outputs: list[RequestOutput] = []
        for request_id in ids:
            result = finished[request_id]
            if not isinstance(result, RequestOutput):
                raise result or RequestFailedError(f"Request {request_id!r} has no output.")
            outputs.append(result)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of prompts, as transformers' ``generate(num_beams=…)`` finds them.

        Args:
            prompts: as ``generate`` takes them.
            params: width, limits and length penalty.
            use_tqdm: show a progress bar over the steps.

        Returns:
            One output a prompt, each with ``beam_width`` sequences, best first.

        Raises:
            InvalidRequestError: a prompt is wrong, or the width needs more log probabilities than the engine gives.
        """
        eos_token_ids = self._inputs.eos_token_ids
        step = step_params(params, len(eos_token_ids), self._inputs.max_logprobs)
        searches = [
            BeamSearch(request.prompt_token_ids, params, eos_token_ids, self._core.info.max_model_len)
            for request in self._process(prompts, step, None)
        ]
        with tqdm(total=params.max_tokens, desc="Beam search", disable=not use_tqdm) as bar:
            while running := [search for search in searches if not search.finished]:
                owners = [(search, prompt) for search in running for prompt in search.prompts()]
                outputs = self.generate([prompt for _, prompt in owners], step, use_tqdm=False)
                for search in running:
                    scored = (output for (owner, _), output in zip(owners, outputs) if owner is search)
                    search.advance([next_logprobs(output) for output in scored])
                bar.update()
        return [self._beams(search, params) for search in searches]

    def _beams(self, search: BeamSearch, params: BeamSearchParams) -> BeamSearchOutput:
        tokenizer = self._front.tokenizer
        sequences: list[BeamSearchSequence] = []
        for beam in search.best():
            tokens = search.prompt_token_ids + beam.token_ids
            cut = beam.finish_reason == "stop" and not params.include_stop_str_in_output
            text = None
            if tokenizer is not None:
                shown = tokens[:-1] if cut else tokens
                text = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
            sequences.append(
                BeamSearchSequence(tokens, beam.logprobs, beam.cumulative_logprob, text, beam.finish_reason)
            )
        return BeamSearchOutput(sequences)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template.

        Args:
            messages: ``[{"role": "user", "content": "…"}, …]``, or a list of such lists.
            sampling_params, use_tqdm, priority: as in ``generate``.
            chat_template: Jinja text or file instead of the model's.
            add_generation_prompt: end with what begins the assistant's answer.
            continue_final_message: go on with the last message instead of answering it.
            tools: JSON schemas for the template; one that takes none gets them in the system message.
            chat_template_kwargs: further variables for the template.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if one else messages)
        template = read_chat_template(chat_template or self._config.model_config.chat_template)
        prompts: list[Prompt] = []
        for conversation in conversations:
            if tools and not takes_tools(template_text(self._front.tokenizer, template, has_tools=True)):
                conversation, tools_shown = in_messages(conversation, tools), None
            else:
                tools_shown = tools
            text = render(
                self._front.tokenizer, conversation, chat_template=template,
                add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                tools=tools_shown, kwargs=chat_template_kwargs,
            )  # fmt: skip
            # The template writes the special tokens itself.
            prompts.append(self._inputs.encode(text, add_special_tokens=False))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with ``skip_tokenizer_init``."""
        return self._front.tokenizer

    @property
    def info(self) -> EngineInfo:
        """What the engine was sized for."""
        return self._core.info

    def get_default_sampling_params(self) -> SamplingParams:
        """What a prompt without parameters is sampled with."""
        return SamplingParams(**self._front.default_sampling_params)

    def get_metrics(self) -> list[Metric]:
        """All metrics of this engine, as ``/metrics`` of a server shows them: one entry a name and labels."""
        return self._metrics.snapshot()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        with self._lock:
            self._core.reset_prefix_cache()

    def start_profile(self) -> None:
        """Begin a JAX profile of this process, in the folder ``profiler_dir``.

        Raises:
            InvalidRequestError: the LLM was built without one, or a profile runs already.
        """
        self._profile(start=True)

    def stop_profile(self) -> None:
        """End the profile and write it.

        Raises:
            InvalidRequestError: no profile runs.
        """
        self._profile(start=False)

    def _profile(self, *, start: bool) -> None:
        self._ensure_open()
        with self._lock:
            error = self._core.profile(start=start)
        if error is not None:
            raise InvalidRequestError(error, param="profiler_dir")

    def close(self) -> None:
        """Free the device's memory; the LLM cannot be used afterwards. Callable twice."""
        with self._lock:
            self._closed = True
            LLM._alive.pop(self, None)
            self._release()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ensure_open(self) -> None:
        if self._closed:
            raise EngineDeadError("This LLM was closed; build a new one.")
        if self._dead is not None:
            raise EngineDeadError(f"The engine died: {self._dead!r}. Build a new LLM.") from self._dead

    def _run(
        self, request_ids: list[str], use_tqdm: bool, check_interrupt: Callable[[], None]
    ) -> dict[str, RequestOutput]:
        """Step until these requests have ended; what ends meanwhile of the enqueued ones is kept.

        Raises:
            RequestFailedError: one of these failed; the caller aborts the others.
            EngineDeadError: the core broke.
        """
        finished: dict[str, RequestOutput] = {}
        missing = set(request_ids)
        bar = tqdm(total=len(missing), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True)
        with bar, no_full_collections():
            while missing:
                check_interrupt()
                processed = self._step()
                for request_id, error in processed.failures:
                    if request_id in missing:
                        raise error
                    self._finished[request_id] = error
                for result in processed.results:
                    if result.request_id in missing:
                        missing.remove(result.request_id)
                        finished[result.request_id] = result
                        bar.update()
                    else:
                        self._finished[result.request_id] = result
        return finished

    def _step(self) -> ProcessedOutputs:
        try:
            outputs = self._core.step()
        except Exception as error:  # a failed step is contained; this is the scheduler's own state
            self._dead = error
            raise EngineDeadError(f"The engine died: {error!r}. Build a new LLM.") from error
        processed = self._outputs.process_outputs(outputs.outputs, outputs.timestamp)
        if outputs.stats is not None:
            self._metrics.record_stats(outputs.stats)
        if processed.request_ids_to_abort:
            self._core.abort(processed.request_ids_to_abort)
        return processed


def _release(core: EngineCore, inputs: InputProcessor, tracer: RequestTracer | None) -> None:
    core.close()
    inputs.close()
    if tracer is not None:
        tracer.close()


def _others_hint(models: Sequence[str]) -> str:
    return f" This process also holds an LLM of {', '.join(models)}: close() it first." if models else ""


@contextlib.contextmanager
def _interrupts_between_steps() -> Generator[Callable[[], None], None, None]:
    """Hold Ctrl-C back while a step changes the scheduler and the donated device state: it is raised by the
    function given here, between steps. Other threads than the main one never receive it."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    pending: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        pending.append((number, frame))

    def check() -> None:
        if pending:
            previous(*pending.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
    check()


def _as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many? A list of integers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [cast(Prompt, prompts)]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}.", param="prompts"
        )
    many: list[Any] = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [cast(Prompt, many)]
    return many


def _per_prompt(name: str, value: Any, num_prompts: int) -> list[Any]:
    if value is None or isinstance(value, SamplingParams):
        return [value] * num_prompts
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
        raise InvalidRequestError(
            f"{name} must be one value for all prompts or a list of one a prompt, got {type(value).__name__}.",
            param=name,
        )
    values: list[Any] = list(cast("Sequence[Any]", value))
    if len(values) != num_prompts:
        raise InvalidRequestError(f"{name} has {len(values)} entries for {num_prompts} prompts.", param=name)
    return values


def _final_only(params: SamplingParams) -> SamplingParams:
    return params.clone(output_kind=RequestOutputKind.FINAL_ONLY)

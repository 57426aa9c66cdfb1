"""Harness: drives a Scheduler and a FakeRunner as the engine core does, and collects what each request
got."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from fake_runner import (
    GENERATED,
    FakePendingStep,
    FakeRunner,
    fingerprint,
    full_attention_group,
    next_token,
)

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.kv_cache_spec import KVCacheGroup
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.step import (
    BurstLimits,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
)
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.reasoning_gate import constraint_of
from jaxserve.structured_output.request_grammar import MaskFiller

VOCAB_SIZE = 50
EOS = 2


@dataclass
class Result:
    """Everything that was returned for one request."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def stop_reason(self) -> int | None:
        return self.outputs[-1].stop_reason if self.outputs else None

    @property
    def error(self) -> str | None:
        return self.outputs[-1].error if self.outputs else None


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_model_len: int = 1024,
    eos: tuple[int, ...] = (EOS,),
    arrival_time: float = 0.0,
    priority: int = 0,
    cache_salt: str | None = None,
    bad_words: list[list[int]] | None = None,
    compiler: GrammarCompiler | None = None,
    **params: object,
) -> Request:
    """A greedy request; further arguments are SamplingParams. ``compiler`` is for those with a grammar."""
    sampling_params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})
    core_request = EngineCoreRequest(
        request_id,
        prompt,
        sampling_params,
        arrival_time,
        seed=0,
        eos_token_ids=list(eos),
        bad_words_token_ids=bad_words or [],
        priority=priority,
        cache_salt=cache_salt,
    )
    grammar = None
    if compiler is not None:
        grammar = constraint_of(compiler, sampling_params, VOCAB_SIZE)
    return Request(core_request, max_model_len, grammar)


def generate_alone(
    request: Request, max_model_len: int = 1024, separate_paths: bool = False
) -> tuple[list[int], FinishReason, int | None]:
    """What a greedy request must get: tokens, finish reason and stop reason, computed without any
    scheduler."""
    params, prompt = request.sampling_params, request.all_token_ids[: request.num_prompt_tokens]
    state = 0
    for token_id in prompt:
        state = fingerprint(state, token_id)
    eos = set() if params.ignore_eos else set(request.eos_token_ids)
    stops = eos | set(params.stop_token_ids or ())
    output: list[int] = []
    while True:
        token_id = next_token(state, 0, VOCAB_SIZE)
        while len(output) < params.min_tokens and token_id in stops:
            token_id = (token_id + 1) % VOCAB_SIZE
        output.append(token_id)
        state = fingerprint(state, token_id + GENERATED * separate_paths)
        if token_id in stops:
            return output, FinishReason.STOP, None if token_id in eos else token_id
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_model_len:
            return output, FinishReason.LENGTH, None


class Harness:
    """A scheduler and a fake runner.

    Args:
        num_blocks: blocks of each rank beside its dummy.
        depth: steps that may be in flight while the next one is scheduled (0 is synchronous).
        compiler: of the grammars that requests bring.
        data_parallel_size: ranks.
        separate_paths, bursts, step_sizes: of the runner.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        groups: list[KVCacheGroup] | None = None,
        depth: int = 0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 1024,
        enable_prefix_caching: bool = True,
        compiler: GrammarCompiler | None = None,
        data_parallel_size: int = 1,
        separate_paths: bool = False,
        bursts: BurstLimits | None = None,
        step_sizes: tuple[int, ...] = (),
        **config: object,
    ) -> None:
        groups = groups or [full_attention_group()]
        self.depth, self.max_model_len, self.compiler = depth, max_model_len, compiler
        self.separate_paths = separate_paths
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **config
            ),
            CacheConfig(enable_prefix_caching=enable_prefix_caching),
            groups,
            num_blocks + 1,
            block_size,
            max_model_len,
            None if compiler is None else MaskFiller(compiler),
            data_parallel_size,
            separate_paths,
            bursts,
            step_sizes,
        )
        self.runner = FakeRunner(
            num_blocks + 1,
            block_size,
            groups,
            max_model_len,
            VOCAB_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            data_parallel_size=data_parallel_size,
            separate_paths=separate_paths,
            bursts=bursts,
        )
        self.in_flight: deque[tuple[SchedulerOutput, FakePendingStep]] = deque()
        self.requests: dict[str, Request] = {}
        self.results: dict[str, Result] = {}
        self.failed: list[str] = []
        """Ids of requests that ended with an error, in that order."""
        self.now = 0.0

    def add(self, request_id: str, prompt: list[int], **params: object) -> Request:
        request = make_request(
            request_id, prompt, max_model_len=self.max_model_len, compiler=self.compiler, **params
        )
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        self.results[request_id] = Result()
        return request

    def schedule(self) -> SchedulerOutput:
        """Schedule a step and dispatch it, if it has tokens."""
        self.now += 1.0
        before = [(request, request.data_rank, request.num_preemptions) for request in self.scheduler.running]
        step = self.scheduler.schedule(self.now)
        if step.num_scheduled_tokens:
            preempting = {rank for request, rank, count in before if request.num_preemptions > count}
            assert preempting.isdisjoint(new.data_rank for new in step.new_requests), (
                "starts where others lost rows"
            )
            self.in_flight.append((step, self.runner.execute(step)))
        else:
            assert step == SchedulerOutput(step.step_id)
            self._collect(self.scheduler.take_outputs())
        return step

    def read(self) -> list[EngineCoreOutput]:
        """Read the oldest step in flight."""
        step, pending = self.in_flight.popleft()
        outputs = self.scheduler.update_from_output(step, pending.result())
        self._collect(outputs)
        return outputs

    def step(self) -> SchedulerOutput:
        """Schedule one step; read old ones beyond ``depth``, or one if nothing could be scheduled."""
        step = self.schedule()
        if self.in_flight and (len(self.in_flight) > self.depth or not step.num_scheduled_tokens):
            self.read()
        return step

    def run(self, max_steps: int = 2000) -> list[SchedulerOutput]:
        """Step until nothing is left, and check that everything came back."""
        steps: list[SchedulerOutput] = []
        while self.scheduler.has_work() or self.in_flight:
            if self.scheduler.has_work():
                steps.append(self.step())
            else:
                self.read()
            assert len(steps) < max_steps, "the requests do not end"
        self.check_idle()
        return steps

    def lose_device(self) -> set[str]:
        """The device lost its state, and all steps in flight with it; returns the ids that fail."""
        before = len(self.failed)
        while self.in_flight:
            step, _ = self.in_flight.popleft()
            failed = dict.fromkeys(step.num_scheduled_tokens, "device lost")
            self._collect(
                self.scheduler.update_from_output(step, ModelRunnerOutput(step.step_id, failed=failed))
            )
        running = [request.request_id for request in self.scheduler.running]
        self._collect(self.scheduler.fail_requests(running, "device lost"))
        self.scheduler.reset_prefix_cache()
        self.runner.recover()
        return set(self.failed[before:])

    def _collect(self, outputs: list[EngineCoreOutput]) -> None:
        ids = [output.request_id for output in outputs]
        assert len(ids) == len(set(ids)), "two outputs of one request in a step"
        for output in outputs:
            result = self.results[output.request_id]
            assert result.finish_reason is None, f"{output.request_id}: an output after its end"
            result.token_ids += output.new_token_ids
            if output.error is not None:
                self.failed.append(output.request_id)
            result.outputs.append(output)

    # --- checks ---------------------------------------------------------------------------------------------

    def check_pool(self) -> None:
        """On each rank every block is free or referenced as often as tables hold it, and is found by what it
        holds."""
        for rank, kv_cache in enumerate(self.scheduler.kv_caches):
            pool = kv_cache.pool
            held: Counter[int] = Counter()
            for request in self.requests.values():
                if request.data_rank == rank:
                    for table in request.block_ids:
                        held.update(block for block in table if block)
            assert pool.ref_counts == [held[block] for block in range(pool.num_blocks)]
            free = pool.free_list()
            assert len(free) == pool.num_free
            assert sorted([*free, *held]) == list(range(1, pool.num_blocks))
            cached = pool.cached_blocks()
            assert len(set(cached.values())) == len(cached)

    def check_idle(self) -> None:
        """No request, no block in use."""
        assert not self.scheduler.has_unfinished()
        assert not self.scheduler.has_work()
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks - len(self.scheduler.kv_caches)
        assert stats.kv_cache_usage == 0.0
        self.check_pool()

    def check_result(self, request_id: str) -> None:
        """The request got what it would have got alone."""
        result, expected = (
            self.results[request_id],
            generate_alone(self.requests[request_id], self.max_model_len, self.separate_paths),
        )
        assert (result.token_ids, result.finish_reason, result.stop_reason) == expected, request_id

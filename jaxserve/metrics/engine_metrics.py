"""EngineMetrics: what an engine reports about itself, under vLLM's names with the prefix ``jaxserve:``.

Gauges and counters are exact: gauges show the state after the last step, counters every event since
the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, multiprocess
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from jaxserve.metrics.buckets import (
    COUNT_OF_CHOICES,
    EXPERT_IMBALANCE,
    INTER_TOKEN_SECONDS,
    ITERATION_TOKENS,
    PREEMPTIONS,
    REQUEST_SECONDS,
    STEP_SECONDS,
    TIME_TO_FIRST_TOKEN_SECONDS,
    one_two_five,
)
from jaxserve.metrics.counted_histogram import CountedHistogram
from jaxserve.metrics.snapshot import Metric, snapshot
from jaxserve.outputs import RequestMetrics
from jaxserve.step import SchedulerStats

PREFIX = "jaxserve:"
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
LABELS = ("model_name", "engine")


def shared_registry() -> CollectorRegistry | None:
    """The metrics of all processes that share an engine, from their files; None in a process of its own."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return None
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return registry


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One finished request, as ``record_finished`` takes it.

    Args:
        finish_reason: stop, length, abort or error.
        num_prompt_tokens: tokens of the prompt.
        num_generation_tokens: tokens generated, over all choices.
        max_num_generation_tokens: tokens of the longest choice.
        num_cached_tokens: prompt tokens found in the prefix cache.
        n: choices asked for.
        max_tokens: the limit asked for; None without one.
        times: the request's times, where the engine kept them.
    """

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    max_num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    n: int = 1
    max_tokens: int | None = None
    times: RequestMetrics | None = None


class EngineMetrics:
    """All metrics of one engine in a registry of their own. Calls are cheap and must come from one thread.

    Args:
        model_name: the served model's name, a label of every metric.
        max_model_len: longest prompt plus output, in tokens; bounds the token histograms.
        engine: the engine's index, a label of every metric.
    """

    def __init__(self, model_name: str, max_model_len: int, *, engine: str = "0") -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.model_name = model_name
        self._labels = {"model_name": model_name, "engine": engine}
        self._last = SchedulerStats()
        tokens = one_two_five(max_model_len)
        self._declare_state()
        self._declare_tokens(tokens)
        self._declare_requests(tokens)

    # --- what the engine calls -------------------------------------------------------------------------

    def record_stats(self, stats: SchedulerStats) -> None:
        """Take the scheduler's state after a step; its counters are totals since the engine's start."""
        last, self._last = self._last, stats
        self._record_state(last, stats)
        for counter, before, now in (
            (self._cache_queries, last.prefix_cache_queries, stats.prefix_cache_queries),
            (self._cache_hits, last.prefix_cache_hits, stats.prefix_cache_hits),
            (self._preemptions, last.num_preemptions, stats.num_preemptions),
            (self._compilations, last.num_compilations, stats.num_compilations),
        ):
            if now > before:
                counter.inc(now - before)
        if stats.step_tokens:
            self._iteration_tokens.observe_many(stats.step_tokens, 1)
            self._step_host.observe_many(max(0.0, stats.step_host_seconds), 1)
        if stats.step_device_seconds > 0:
            self._step_device.observe_many(stats.step_device_seconds, 1)
        if stats.step_padded_tokens:
            self._count_shape(stats.step_padded_tokens, stats.step_padding_tokens)
        if stats.step_expert_imbalance > 0:
            self._expert_imbalance.observe(stats.step_expert_imbalance)

    def _record_state(self, last: SchedulerStats, stats: SchedulerStats) -> None:
        """Set the gauges that changed: nobody else sets them, and in most steps of a batch that decodes none does."""
        if stats.num_running != last.num_running:
            self._running.set(stats.num_running)
        if stats.num_waiting != last.num_waiting or stats.num_deferred != last.num_deferred:
            self._waiting.set(stats.num_waiting)
            self._waiting_for_room.set(stats.num_waiting - stats.num_deferred)
            self._deferred.set(stats.num_deferred)
        if stats.kv_cache_usage != last.kv_cache_usage:
            self._cache_usage.set(stats.kv_cache_usage)

    def _count_shape(self, num_tokens: int, num_padding: int) -> None:
        steps = self._steps_by_shape.get(num_tokens)
        if steps is None:
            steps = self._steps.labels(num_tokens=str(num_tokens), **self._labels)
            self._steps_by_shape[num_tokens] = steps
        steps.inc()
        if num_padding:
            self._padding.inc(num_padding)

    def record_prompt(
        self, num_prompt_tokens: int, num_cached_tokens: int, time_to_first_token: float
    ) -> None:
        """Count a prompt at its first token, ``time_to_first_token`` seconds after its arrival."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_tokens_cached.inc(num_cached_tokens)
        self._prompt_tokens_computed.inc(max(0, num_prompt_tokens - num_cached_tokens))
        self._prompt_tokens_found.inc(num_cached_tokens)
        self._time_to_first_token.observe(max(0.0, time_to_first_token))

    def record_tokens(self, num_tokens: int, seconds_since_last: float | None = None) -> None:
        """Count new output tokens of one request, ``seconds_since_last`` after its previous ones.

        None stands for a request's first tokens.
        """
        self._generation_tokens.inc(num_tokens)
        if seconds_since_last is not None:
            self._inter_token.observe(max(0.0, seconds_since_last))

    def record_step_tokens(self, num_tokens: int, seconds_since_last: Mapping[float, int]) -> None:
        """``record_tokens`` for all requests of a step at once.

        Args:
            num_tokens: new output tokens of them all.
            seconds_since_last: times since a request's previous tokens, and how many requests had each: in a batch that
                decodes they are nearly all the same.
        """
        self._generation_tokens.inc(num_tokens)
        for seconds, count in seconds_since_last.items():
            self._inter_token.observe_many(max(0.0, seconds), count)

    def record_finished(self, request: FinishedRequest) -> None:
        """Count a finished request and observe its lengths and times."""
        self._finished[request.finish_reason].inc()
        self._request_prompt_tokens.observe(request.num_prompt_tokens)
        self._request_generation_tokens.observe(request.num_generation_tokens)
        self._request_max_generation_tokens.observe(
            request.max_num_generation_tokens or request.num_generation_tokens
        )
        self._request_computed_tokens.observe(max(0, request.num_prompt_tokens - request.num_cached_tokens))
        self._request_n.observe(request.n)
        if request.max_tokens is not None:
            self._request_max_tokens.observe(request.max_tokens)
        if request.times is not None:
            self._observe_times(request.times)

    def record_rejected(self, reason: str) -> None:
        """Count a request that was refused before admission, such as ``queue_full``."""
        self._rejections.labels(reason=reason, **self._labels).inc()

    def record_cache_config(self, **config: Any) -> None:
        """Expose the cache's configuration as labels of ``cache_config_info``."""
        labels = {key: str(value) for key, value in config.items()}
        info = Gauge(
            PREFIX + "cache_config_info",
            "Configuration of the KV cache.",
            [*LABELS, *labels],
            registry=self.registry,
            multiprocess_mode="max",
        )
        info.labels(**self._labels, **labels).set(1)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type; of all processes, where several share an engine."""
        return generate_latest(shared_registry() or self.registry), CONTENT_TYPE_LATEST

    def snapshot(self) -> list[Metric]:
        """The values now."""
        return snapshot(self.registry)

    # --- declarations ----------------------------------------------------------------------------------

    def _gauge(self, name: str, help: str) -> Gauge:
        # Of several processes only one sets it: the sum is its value.
        gauge = Gauge(PREFIX + name, help, LABELS, registry=self.registry, multiprocess_mode="livesum")
        return gauge.labels(**self._labels)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(PREFIX + name, help, LABELS, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> CountedHistogram:
        metric = CountedHistogram(PREFIX + name, help, LABELS, registry=self.registry, buckets=buckets)
        return metric.labels(**self._labels)

    def _declare_state(self) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be scheduled.")
        by_reason = Gauge(
            PREFIX + "num_requests_waiting_by_reason",
            "Requests that wait, for room in the batch (capacity) or for their grammar (deferred).",
            [*LABELS, "reason"],
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self._waiting_for_room = by_reason.labels(reason="capacity", **self._labels)
        self._deferred = by_reason.labels(reason="deferred", **self._labels)
        self._cache_usage = self._gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Requests preempted.")
        self._compilations = self._counter("compilations", "Programs compiled after the engine was ready.")
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of a step.", ITERATION_TOKENS
        )
        self._steps = Counter(
            PREFIX + "steps", "Steps, by the padded number of tokens of their shape.", [*LABELS, "num_tokens"],
            registry=self.registry,
        )  # fmt: skip
        self._steps_by_shape: dict[int, Counter] = {}
        self._padding = self._counter("padding_tokens", "Tokens of steps' shapes that were padding.")
        self._expert_imbalance = self._histogram(
            "moe_expert_imbalance",
            "Tokens of the most loaded expert (of the most loaded device, under expert parallelism) over the mean.",
            EXPERT_IMBALANCE,
        )
        self._step_host = self._histogram(
            "step_host_seconds", "The host's work in a step, without waiting for the device.", STEP_SECONDS
        )
        self._step_device = self._histogram(
            "step_device_seconds", "The device's work in a step, as the host sees it.", STEP_SECONDS
        )
        self._rejections = Counter(
            PREFIX + "admission_rejections", "Requests refused before admission.", [*LABELS, "reason"],
            registry=self.registry,
        )  # fmt: skip

    def _declare_tokens(self, tokens: tuple[float, ...]) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        by_source = Counter(
            PREFIX + "prompt_tokens_by_source",
            "Prompt tokens computed here (local_compute) and found in the prefix cache (local_cache_hit).",
            [*LABELS, "source"],
            registry=self.registry,
        )
        self._prompt_tokens_computed = by_source.labels(source="local_compute", **self._labels)
        self._prompt_tokens_found = by_source.labels(source="local_cache_hit", **self._labels)
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TIME_TO_FIRST_TOKEN_SECONDS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between outputs of a request.", INTER_TOKEN_SECONDS
        )
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", tokens
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request.", tokens
        )
        self._request_max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", tokens
        )
        self._request_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, without those cached.", tokens
        )

    def _declare_requests(self, tokens: tuple[float, ...]) -> None:
        finished = Counter(
            PREFIX + "request_success",
            "Requests finished.",
            [*LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._finished = {
            reason: finished.labels(finished_reason=reason, **self._labels) for reason in FINISH_REASONS
        }
        self._request_n = self._histogram("request_params_n", "Choices asked for.", COUNT_OF_CHOICES)
        self._request_max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens asked for.", tokens
        )
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a request.", PREEMPTIONS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", REQUEST_SECONDS
        )
        self._queue_time = self._histogram("request_queue_time_seconds", "Waiting.", REQUEST_SECONDS)
        self._inference_time = self._histogram("request_inference_time_seconds", "Running.", REQUEST_SECONDS)
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", "From first scheduled to the first token.", REQUEST_SECONDS
        )
        self._decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_SECONDS
        )
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first.",
            INTER_TOKEN_SECONDS,
        )

    def _observe_times(self, times: RequestMetrics) -> None:
        self._request_preemptions.observe(times.num_preemptions)
        scheduled, first, last = times.first_scheduled_time, times.first_token_time, times.last_token_time
        if scheduled is not None:
            self._queue_time.observe(max(0.0, scheduled - times.arrival_time))
        if first is None or last is None:
            return
        self._e2e.observe(max(0.0, last - times.arrival_time))
        decode = max(0.0, last - first)
        self._decode_time.observe(decode)
        if times.num_generation_tokens > 1:
            self._time_per_output_token.observe(decode / (times.num_generation_tokens - 1))
        if scheduled is not None:
            self._prefill_time.observe(max(0.0, first - scheduled))
            self._inference_time.observe(max(0.0, last - scheduled))

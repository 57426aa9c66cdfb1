from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from jaxserve.metrics.buckets import one_two_five
from jaxserve.metrics.engine_metrics import EngineMetrics, FinishedRequest
from jaxserve.metrics.http_metrics import HTTPMetrics
from jaxserve.outputs import RequestMetrics
from jaxserve.step import SchedulerStats

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("m", 1000)


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"jaxserve:{name}", {**LABELS, **labels})
    assert found is not None, name
    return found


def test_gauges_show_the_last_state(metrics):
    metrics.record_stats(SchedulerStats(num_running=3, num_waiting=2, kv_cache_usage=0.25))
    metrics.record_stats(SchedulerStats(num_running=1, num_waiting=0, kv_cache_usage=0.5))
    assert value(metrics, "num_requests_running") == 1
    assert value(metrics, "num_requests_waiting") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0.5


def test_gauges_follow_every_change(metrics):
    """They are set where they changed alone."""
    for waiting, deferred, running in (
        (0, 0, 0),
        (5, 0, 1),
        (5, 3, 1),
        (4, 3, 1),
        (4, 3, 0),
        (0, 0, 0),
        (0, 0, 2),
    ):
        metrics.record_stats(
            SchedulerStats(
                num_running=running, num_waiting=waiting, num_deferred=deferred, kv_cache_usage=running / 4
            )
        )
        assert value(metrics, "num_requests_running") == running
        assert value(metrics, "num_requests_waiting") == waiting
        by_reason = {
            reason: value(metrics, "num_requests_waiting_by_reason", reason=reason)
            for reason in ("capacity", "deferred")
        }
        assert by_reason == {"capacity": waiting - deferred, "deferred": deferred}
        assert value(metrics, "kv_cache_usage_perc") == running / 4


def test_counters_follow_totals(metrics):
    totals = {"prefix_cache_queries": 10, "prefix_cache_hits": 4, "num_preemptions": 1, "num_compilations": 2}
    metrics.record_stats(SchedulerStats(**totals))
    metrics.record_stats(SchedulerStats(**totals))
    metrics.record_stats(SchedulerStats(**{name: total + 5 for name, total in totals.items()}))
    assert value(metrics, "prefix_cache_queries_total") == 15
    assert value(metrics, "prefix_cache_hits_total") == 9
    assert value(metrics, "num_preemptions_total") == 6
    assert value(metrics, "compilations_total") == 7


def test_steps_that_ran_nothing_are_not_observed(metrics):
    metrics.record_stats(SchedulerStats(step_tokens=0))
    metrics.record_stats(SchedulerStats(step_tokens=7))
    assert value(metrics, "iteration_tokens_total_count") == 1
    assert value(metrics, "iteration_tokens_total_sum") == 7
    assert value(metrics, "iteration_tokens_total_bucket", le="8.0") == 1


def test_shapes_and_padding(metrics):
    metrics.record_stats(SchedulerStats())
    for padded, padding in ((64, 3), (64, 0), (8, 7)):
        metrics.record_stats(SchedulerStats(step_padded_tokens=padded, step_padding_tokens=padding))
    assert value(metrics, "steps_total", num_tokens="64") == 2
    assert value(metrics, "steps_total", num_tokens="8") == 1
    assert value(metrics, "padding_tokens_total") == 10


def test_expert_imbalance(metrics):
    for imbalance in (0.0, 1.2, 3.5):  # the first from a step, or a model, without experts
        metrics.record_stats(SchedulerStats(step_expert_imbalance=imbalance))
    assert value(metrics, "moe_expert_imbalance_count") == 2
    assert value(metrics, "moe_expert_imbalance_sum") == 4.7
    assert value(metrics, "moe_expert_imbalance_bucket", le="1.25") == 1


def test_tokens(metrics):
    metrics.record_prompt(100, 64, 0.03)
    metrics.record_tokens(1)
    metrics.record_tokens(2, 0.02)
    assert value(metrics, "prompt_tokens_total") == 100
    assert value(metrics, "prompt_tokens_cached_total") == 64
    assert value(metrics, "generation_tokens_total") == 3
    assert value(metrics, "time_to_first_token_seconds_sum") == pytest.approx(0.03)
    assert value(metrics, "inter_token_latency_seconds_count") == 1


def test_a_finished_request(metrics):
    times = RequestMetrics(
        arrival_time=10.0,
        first_scheduled_time=10.5,
        first_token_time=11.0,
        last_token_time=13.0,
        num_generation_tokens=5,
        num_preemptions=2,
    )
    metrics.record_finished(
        FinishedRequest("stop", 100, 10, 6, num_cached_tokens=64, n=2, max_tokens=50, times=times)
    )
    expected = {
        "request_prompt_tokens": 100,
        "request_generation_tokens": 10,
        "request_max_num_generation_tokens": 6,
        "request_prefill_kv_computed_tokens": 36,
        "request_params_n": 2,
        "request_params_max_tokens": 50,
        "request_num_preemptions": 2,
        "e2e_request_latency_seconds": 3.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.5,
        "request_inference_time_seconds": 2.5,
        "request_decode_time_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.5,
    }
    for name, total in expected.items():
        assert value(metrics, f"{name}_sum") == pytest.approx(total), name
        assert value(metrics, f"{name}_count") == 1, name
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 0


def test_a_request_that_never_ran(metrics):
    metrics.record_finished(FinishedRequest("abort", 10, 0, times=RequestMetrics(arrival_time=1.0)))
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "e2e_request_latency_seconds_count") == 0
    assert value(metrics, "request_queue_time_seconds_count") == 0


def test_rejections_and_cache_config(metrics):
    metrics.record_rejected("queue_full")
    metrics.record_cache_config(block_size=16, num_gpu_blocks=100)
    assert value(metrics, "admission_rejections_total", reason="queue_full") == 1
    assert value(metrics, "cache_config_info", block_size="16", num_gpu_blocks="100") == 1


def test_all_names_have_the_prefix_and_labels(metrics):
    text, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    for line in text.decode().splitlines():
        if not line.startswith("#"):
            assert line.startswith("jaxserve:")
            assert 'model_name="m"' in line
            assert 'engine="0"' in line


def test_two_engines_share_nothing():
    first, second = EngineMetrics("m", 10), EngineMetrics("m", 10)
    first.record_tokens(5)
    assert value(second, "generation_tokens_total") == 0


@pytest.mark.parametrize(
    "limit, bounds",
    [
        (1, (1,)),
        (4, (1, 2)),
        (10, (1, 2, 5, 10)),
        (1000, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
        (0, (1,)),
    ],
)
def test_token_buckets(limit, bounds):
    assert one_two_five(limit) == bounds


def test_http_metrics():
    registry = CollectorRegistry()
    metrics = HTTPMetrics(registry)
    metrics.record("/v1/models", "GET", 204, 0.02)
    metrics.record("/v1/models", "GET", 503, 0.02)
    labels = {"handler": "/v1/models", "method": "GET"}
    assert registry.get_sample_value("http_requests_total", {**labels, "status": "2xx"}) == 1
    assert registry.get_sample_value("http_requests_total", {**labels, "status": "5xx"}) == 1
    assert registry.get_sample_value("http_request_duration_seconds_count", labels) == 2


def test_many_equal_values_are_as_one_after_another():
    values = [(0.0, 3), (0.01, 2), (0.010001, 1), (0.3, 40), (80.0, 1), (1000.0, 2)]
    one_by_one, at_once = EngineMetrics("m", 100), EngineMetrics("m", 100)
    for value, count in values:
        for _ in range(count):
            one_by_one.record_tokens(1, value)
    at_once.record_step_tokens(49, dict(values))
    first, second = (
        {sample.name + sample.labels.get("le", ""): sample.value for family in metrics.registry.collect()
         for sample in family.samples if "latency" in sample.name or "generation" in sample.name
         if not sample.name.endswith("_created")}
        for metrics in (one_by_one, at_once)
    )  # fmt: skip
    assert first == pytest.approx(second)
    assert first["jaxserve:inter_token_latency_seconds_count"] == 49

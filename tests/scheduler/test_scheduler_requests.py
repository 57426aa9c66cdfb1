"""How requests enter and end: validation, stop conditions, abort, failure, statistics."""

from __future__ import annotations

import pytest
from fake_runner import FakeRow, sliding_window_group
from scheduler_harness import EOS, Harness, make_request

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.errors import ConfigError, InvalidRequestError, QueueFullError
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.step import FinishReason, ModelRunnerOutput


def scripted(harness: Harness, tokens: list[int]) -> None:
    """Every request gets these output tokens."""
    harness.runner.sampler = lambda row, _: tokens[len(row.token_ids) - row.num_prompt_tokens]


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, config, match",
    [
        ([], {}, "empty"),
        ([1] * 40, {"max_model_len": 40}, "40 tokens, but the context length is 40"),
        ([1] * 33, {"enable_chunked_prefill": False}, "max_num_batched_tokens"),
        ([1] * 50, {"num_blocks": 12}, "12 blocks of 4 tokens"),
    ],
)
def test_requests_that_can_never_run_are_refused(prompt: list[int], config: dict, match: str) -> None:
    harness = Harness(**config)
    with pytest.raises(InvalidRequestError, match=match) as error:
        harness.add("a", prompt)
    assert error.value.param == "prompt"
    assert not harness.scheduler.has_unfinished()


def test_the_longest_requests_that_can_run_do() -> None:
    harness = Harness(num_blocks=12, max_model_len=49)
    harness.add("cache", [1] * 48, max_tokens=1)
    harness.run()
    harness.check_result("cache")
    harness = Harness(max_model_len=40, enable_chunked_prefill=False)
    harness.add("context", [1] * 32, max_tokens=None, ignore_eos=True)
    harness.run()
    harness.check_result("context")
    assert len(harness.results["context"].token_ids) == 8


def test_a_window_makes_long_prompts_fit_small_caches() -> None:
    harness = Harness(num_blocks=4, groups=[sliding_window_group(5)], max_num_seqs=4)
    harness.add("a", [1] * 100, max_tokens=30)
    harness.run()
    harness.check_result("a")


def test_an_id_is_in_use_until_its_request_ends() -> None:
    harness = Harness()
    harness.add("a", [1], max_tokens=1)
    with pytest.raises(InvalidRequestError, match="'a' is in use") as error:
        harness.add("a", [1])
    assert error.value.param == "request_id"
    harness.run()
    harness.add("a", [2, 3])
    harness.run()
    harness.check_result("a")


def test_the_queue_has_a_limit() -> None:
    harness = Harness(max_num_seqs=1, max_num_queued_reqs=2)
    harness.add("a", [1])
    harness.add("b", [1])
    with pytest.raises(QueueFullError, match="2 requests wait"):
        harness.add("c", [1])
    harness.step()
    harness.add("c", [1])
    harness.run()


@pytest.mark.parametrize(
    "config, match",
    [
        ({}, "resolved"),
        ({"max_num_seqs": 8}, "resolved"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "greater"),
    ],
)
def test_limits_must_be_resolved_and_agree(config: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Scheduler(SchedulerConfig(**config), CacheConfig(), [sliding_window_group(4)], 8, 4, 100)


# --- how requests end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "params, tokens, finish_reason, stop_reason",
    [
        ({}, [5, EOS], "stop", None),
        ({"ignore_eos": True}, [5, EOS, 6, 7], "length", None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [5, EOS], "stop", EOS),
        ({"stop_token_ids": [6]}, [5, 6], "stop", 6),
        ({"stop_token_ids": [6, EOS]}, [5, EOS], "stop", None),
        ({"stop_token_ids": [5], "min_tokens": 2}, [5, 5], "stop", 5),
        ({"min_tokens": 3}, [EOS, EOS, EOS], "stop", None),
        ({}, [5, 6, 7, 8], "length", None),
        ({}, [5, 6, 7, EOS], "stop", None),
        ({"max_tokens": 1}, [5], "length", None),
        ({"max_tokens": 1}, [EOS], "stop", None),
    ],
)
def test_stop_conditions(
    depth: int, params: dict, tokens: list[int], finish_reason: str, stop_reason: int | None
) -> None:
    harness = Harness(depth=depth)
    scripted(harness, [*tokens, 9, 9, 9])
    harness.add("a", [1, 1, 1], **{"max_tokens": 4, **params})
    harness.run()
    result = harness.results["a"]
    assert result.token_ids == tokens
    assert (result.finish_reason, result.stop_reason) == (finish_reason, stop_reason)
    assert [output.finish_reason for output in result.outputs[:-1]] == [None] * (len(tokens) - 1)


def test_output_ends_at_the_context_length() -> None:
    harness = Harness(max_model_len=10, depth=2)
    for name, max_tokens in [("none", None), ("more", 100), ("fits", 3)]:
        harness.add(name, [1] * 7, max_tokens=max_tokens, ignore_eos=True)
    harness.run()
    for name in harness.requests:
        harness.check_result(name)
        assert len(harness.results[name].token_ids) == 3


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_gives_back_blocks_in_every_state(depth: int) -> None:
    harness = Harness(num_blocks=12, depth=depth, max_num_seqs=3)
    for i in range(5):
        harness.add(str(i), [i] * 9, max_tokens=40, ignore_eos=True)
    while not harness.scheduler.stats().num_preemptions:
        harness.step()
    assert harness.scheduler.stats().num_waiting > 0
    harness.scheduler.abort(["0", "4", "2", "1", "0", "3", "nobody"])
    assert not harness.scheduler.has_work()
    assert harness.scheduler.stats().num_free_blocks == 12
    while harness.in_flight:
        assert harness.read() == []
    harness.add("next", [1] * 5)
    step = harness.schedule()
    assert harness.runner.rows.keys() == {"next"}
    assert set(step.finished_request_ids) <= set("01234")
    harness.run()
    harness.check_result("next")


def test_an_aborted_id_can_be_used_again_while_its_old_step_is_in_flight() -> None:
    harness = Harness(depth=2)
    harness.add("a", [1] * 5, max_tokens=30)
    harness.schedule()
    harness.schedule()
    harness.scheduler.abort(["a"])
    harness.add("a", [2] * 6, max_tokens=5)
    step = harness.schedule()
    assert step.finished_request_ids == ["a"]
    assert [new.request_id for new in step.new_requests] == ["a"]
    harness.run()
    harness.check_result("a")


def test_a_request_aborted_before_it_ran_is_not_told_to_the_runner() -> None:
    harness = Harness()
    harness.add("a", [1])
    harness.scheduler.abort(["a"])
    harness.add("b", [1])
    assert harness.step().finished_request_ids == []
    harness.run()


def test_two_hundred_aborts_at_once() -> None:
    harness = Harness(num_blocks=2000, max_num_seqs=128, max_num_batched_tokens=512, depth=1)
    for i in range(200):
        harness.add(str(i), [i % 50] * 20, max_tokens=100)
    for _ in range(12):
        harness.step()
    harness.scheduler.abort([str(i) for i in range(200)])
    harness.run()
    harness.add("after", [3] * 20)
    harness.run()
    harness.check_result("after")


# --- failures -----------------------------------------------------------------------------------------------


def test_a_failed_row_ends_alone_and_what_it_wrote_is_not_reused() -> None:
    harness = Harness()
    harness.add("bad", [1] * 12)
    harness.add("good", [2] * 12)
    harness.runner.failures["bad"] = "NaN in the logits"
    harness.step()
    harness.add("same prompt", [1] * 12)
    harness.run()
    assert harness.results["bad"].finish_reason is FinishReason.ERROR
    assert harness.results["bad"].error == "NaN in the logits"
    assert harness.results["bad"].token_ids == []
    harness.check_result("good")
    harness.check_result("same prompt")
    assert harness.requests["same prompt"].num_cached_tokens == 0


def test_what_a_failed_row_wrote_is_not_reused_either_if_the_request_was_aborted_before() -> None:
    harness = Harness(depth=1)
    harness.add("bad", [1] * 12)
    harness.runner.failures["bad"] = "NaN in the logits"
    harness.schedule()
    harness.scheduler.abort(["bad"])
    assert harness.read() == []
    harness.add("same prompt", [1] * 12)
    harness.run()
    harness.check_result("same prompt")
    assert harness.requests["same prompt"].num_cached_tokens == 0


def test_failing_requests_in_every_state() -> None:
    harness = Harness(max_num_seqs=1, depth=1)
    harness.add("running", [1] * 12)
    harness.add("waiting", [1] * 12)
    harness.schedule()
    outputs = harness.scheduler.fail_requests(["running", "waiting", "nobody", "waiting"], "device lost")
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("running", FinishReason.ERROR, "device lost"),
        ("waiting", FinishReason.ERROR, "device lost"),
    ]
    harness.run()
    harness.add("next", [1] * 12)
    harness.run()
    harness.check_result("next")
    assert harness.requests["next"].num_cached_tokens == 0


def test_a_step_that_brings_no_token_for_a_row_fails_that_row() -> None:
    harness = Harness()
    harness.add("a", [1], prompt_logprobs=0)
    step = harness.scheduler.schedule(0.0)
    (output,) = harness.scheduler.update_from_output(step, ModelRunnerOutput(step.step_id))
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "The step returned no token for this request."
    harness.check_idle()


def test_steps_are_read_in_order_and_once() -> None:
    harness = Harness()
    harness.add("a", [1], ignore_eos=True)
    scheduler = harness.scheduler
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="expected step 0, got the output of step 1 for step 1"):
        scheduler.update_from_output(second, ModelRunnerOutput(1, {"a": [5]}))
    with pytest.raises(RuntimeError, match="expected step 0, got the output of step 1 for step 0"):
        scheduler.update_from_output(first, ModelRunnerOutput(1, {"a": [5]}))
    scheduler.update_from_output(first, ModelRunnerOutput(0, {"a": [5]}))
    with pytest.raises(RuntimeError, match="expected step 1"):
        scheduler.update_from_output(first, ModelRunnerOutput(0, {"a": [5]}))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_request_that_outgrows_the_whole_cache_fails_with_a_clear_error(depth: int) -> None:
    harness = Harness(num_blocks=4, depth=depth)
    harness.add("a", [1] * 10, max_tokens=50, ignore_eos=True)
    harness.add("b", [2] * 4, max_tokens=3)
    harness.run()
    result = harness.results["a"]
    assert result.finish_reason is FinishReason.ERROR
    assert "17 tokens now; the KV cache (4 blocks of 4 tokens) is too small" in (result.error or "")
    assert len(result.token_ids) == 7  # 16 slots hold 10 + 6 tokens, the seventh is sampled
    harness.check_result("b")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_waiting_request_that_cannot_start_fails(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The cached prefix of a prompt, let in by mistake, fills the whole cache; no other rank is tried."""
    harness = Harness(num_blocks=4, data_parallel_size=ranks)
    harness.add("a", [1] * 16, max_tokens=1)
    harness.run()
    monkeypatch.setattr(harness.scheduler.kv_caches[0], "fits_alone", lambda _: True)
    harness.add("b", [1] * 17)
    harness.add("c", [3] * 5)
    harness.run()
    assert "17 tokens now; the KV cache" in (harness.results["b"].error or "")
    assert "(4 blocks of 4 tokens) is too small" in (harness.results["b"].error or "")
    assert harness.results["b"].token_ids == []
    harness.check_result("c")


def test_outputs_of_failures_while_scheduling_can_be_taken() -> None:
    harness = Harness(num_blocks=2)
    harness.add("a", [1] * 8, max_tokens=5, ignore_eos=True)
    step = harness.scheduler.schedule(0.0)
    harness.scheduler.update_from_output(step, ModelRunnerOutput(0, {"a": [5]}))
    step = harness.scheduler.schedule(0.0)
    assert not step.num_scheduled_tokens
    assert not harness.scheduler.has_unfinished()
    assert harness.scheduler.has_work()
    assert harness.scheduler.update_from_output(step, ModelRunnerOutput(step.step_id))[0].error
    assert not harness.scheduler.has_work()


# --- statistics ---------------------------------------------------------------------------------------------


def test_statistics() -> None:
    harness = Harness(num_blocks=20, max_num_seqs=1, max_num_batched_tokens=16)
    harness.add("a", [1] * 12, max_tokens=2, ignore_eos=True)
    harness.add("b", [1] * 13, max_tokens=1)
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_free_blocks) == (0, 2, 21, 20)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks, stats.step_tokens) == (1, 1, 17, 12)
    assert stats.kv_cache_usage == pytest.approx(3 / 20)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (25, 12)
    assert stats.step_tokens == 1


def test_what_outputs_say_of_a_request() -> None:
    harness = Harness(num_blocks=30)
    harness.add("a", [1] * 12, max_tokens=3, ignore_eos=True)
    harness.run()
    harness.now = 100.0
    harness.add("b", [1] * 12, max_tokens=3, ignore_eos=True, logprobs=2)
    harness.run()
    outputs = harness.results["b"].outputs
    assert [output.num_cached_tokens for output in outputs] == [8, 8, 8]
    assert {output.first_scheduled_time for output in outputs} == {101.0}
    assert [output.new_logprobs[0].token_ids[0] for output in outputs] == harness.results["b"].token_ids
    assert harness.results["a"].outputs[0].new_logprobs is None
    assert harness.results["a"].outputs[0].num_cached_tokens == 0


def test_stop_ids_reach_the_runner_end_of_sequence_first() -> None:
    harness = Harness()
    harness.add("a", [1], eos=(7, 3), stop_token_ids=[1, 9, 3])
    assert harness.step().new_requests[0].stop_token_ids == [3, 7, 1, 9]
    harness.add("b", [1], eos=(7, 3), stop_token_ids=[9], ignore_eos=True)
    assert harness.step().new_requests[0].stop_token_ids == [9]
    harness.run()


def test_the_runner_gets_its_own_copy_of_the_tokens() -> None:
    harness = Harness()
    request = harness.add("a", [1, 2, 3], max_tokens=4, ignore_eos=True)
    new = harness.step().new_requests[0]
    harness.run()
    assert new.token_ids == [1, 2, 3]
    assert new.block_ids == [[1]]
    assert len(request.all_token_ids) == 7


def test_request_knows_whether_it_needs_the_host() -> None:
    assert not make_request("a", [1]).needs_sync
    assert not make_request("a", [1], bad_words=[[4], [5]]).needs_sync
    assert make_request("a", [1], bad_words=[[4], [5, 6]]).needs_sync


def test_the_fake_row_is_what_the_scheduler_sent() -> None:
    harness = Harness()
    harness.add("a", [4, 5, 6], max_tokens=3, ignore_eos=True)
    harness.step()
    row: FakeRow = harness.runner.rows["a"]
    assert row.token_ids[:3] == [4, 5, 6]
    assert row.num_computed_tokens == 3

"""Tokens from the core become text, stops, log probabilities and outputs, streamed or not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.output_processor import OutputProcessor
from jaxserve.engine.output_queue import RequestOutputQueue
from jaxserve.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.step import EngineCoreOutput, FinishReason, TokenLogprobs
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def make_tokenizer() -> FastTokenizer:
    """Every byte a token and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return FastTokenizer(backend, named_tokens={"eos_token": "<eos>"})


TOKENIZER = make_tokenizer()
EOS = TOKENIZER.encode("<eos>")[0]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


class Harness:
    """An input and an output processor, and a core that says what the test tells it."""

    def __init__(self, tokenizer: FastTokenizer | None = TOKENIZER, **kwargs: Any) -> None:
        self.input = InputProcessor(
            tokenizer, max_model_len=1000, vocab_size=257, max_logprobs=-1, eos_token_ids=[EOS]
        )
        self.output = OutputProcessor(tokenizer, **kwargs)

    def add(
        self,
        request_id: str = "r",
        prompt: Any = "Hi",
        queue: RequestOutputQueue | None = None,
        **params: Any,
    ) -> None:
        request = self.input.process(request_id, prompt, SamplingParams(**params), arrival_time=1.0)
        self.output.add_request(request, queue)

    def step(self, *outputs: EngineCoreOutput, at: float = 2.0) -> list[RequestOutput]:
        processed = self.output.process_outputs(outputs, at)
        self.aborted = processed.request_ids_to_abort
        self.failures = processed.failures
        return processed.results


def out(token_ids: Sequence[int], request_id: str = "r", finish: str | None = None, **kwargs: Any):
    reason = None if finish is None else FinishReason(finish)
    return EngineCoreOutput(request_id, list(token_ids), finish_reason=reason, **kwargs)


def logprobs_of(token_ids: Sequence[int], others: Sequence[int] = ()) -> list[TokenLogprobs]:
    return [
        TokenLogprobs([i, *others], [-0.5, *(-1.0 - j for j in range(len(others)))], 3) for i in token_ids
    ]


# --- what each kind of output carries ----------------------------------------------------------------------


def test_cumulative_outputs_hold_everything_so_far():
    harness = Harness()
    harness.add(output_kind=CUMULATIVE)
    (first,) = harness.step(out(ids("He")))
    (second,) = harness.step(out(ids("y"), finish="length"))
    assert (first.outputs[0].text, first.outputs[0].token_ids, first.finished) == ("He", ids("He"), False)
    assert (second.outputs[0].text, second.outputs[0].token_ids, second.finished) == ("Hey", ids("Hey"), True)
    assert second.outputs[0].finish_reason == "length"
    assert first.outputs[0].token_ids == ids("He"), "an output that was handed out does not change"
    assert (second.prompt, second.prompt_token_ids) == ("Hi", ids("Hi"))
    assert not harness.output.has_unfinished


def test_delta_outputs_hold_what_is_new():
    harness = Harness()
    harness.add(output_kind=DELTA)
    (first,) = harness.step(out(ids("He")))
    (second,) = harness.step(out(ids("y"), finish="length"))
    assert (first.outputs[0].text, second.outputs[0].text) == ("He", "y")
    assert second.outputs[0].token_ids == ids("y")
    assert second.finished


def test_final_only_gives_one_output():
    harness = Harness()
    harness.add(output_kind=FINAL_ONLY)
    assert harness.step(out(ids("He"))) == []
    (final,) = harness.step(out(ids("y"), finish="length"))
    assert final.outputs[0].text == "Hey"


def test_n_completions_make_one_output():
    harness = Harness()
    harness.add(n=3, temperature=1.0, output_kind=FINAL_ONLY)
    assert harness.step(out(ids("a"), "0_r", "length"), out(ids("b"), "2_r", "length")) == []
    (final,) = harness.step(out(ids("c"), "1_r", "stop", stop_reason=7))
    assert [c.index for c in final.outputs] == [0, 1, 2]
    assert [c.text for c in final.outputs] == ["a", "", "b"]
    assert final.outputs[1].stop_reason == 7
    assert final.outputs[1].token_ids == ids("c")
    assert final.finished


def test_n_completions_in_deltas_name_only_those_with_news():
    harness = Harness()
    harness.add(n=2, temperature=1.0, output_kind=DELTA)
    (first,) = harness.step(out(ids("a"), "0_r"), out(ids("b"), "1_r"))
    (second,) = harness.step(out(ids("c"), "1_r", "length"))
    (third,) = harness.step(out(ids("d"), "0_r", "length"))
    assert [(c.index, c.text) for c in first.outputs] == [(0, "a"), (1, "b")]
    assert [(c.index, c.text, c.finish_reason) for c in second.outputs] == [(1, "c", "length")]
    assert not second.finished
    assert [(c.index, c.text) for c in third.outputs] == [(0, "d")]
    assert third.finished


def test_half_a_character_waits_and_the_end_shows_it():
    harness = Harness()
    harness.add(output_kind=DELTA)
    half = ids("é")[:1]
    (first,) = harness.step(out(half))
    assert (first.outputs[0].text, first.outputs[0].token_ids) == ("", half)
    (second,) = harness.step(out(half, finish="length"))
    assert second.outputs[0].text == "\ufffd\ufffd"


def test_detokenize_off_makes_no_text():
    harness = Harness()
    harness.add(detokenize=False, logprobs=1)
    (first,) = harness.step(out(ids("ab"), finish="length", new_logprobs=logprobs_of(ids("ab"), ids("c"))))
    completion = first.outputs[0]
    assert (completion.text, completion.token_ids) == ("", ids("ab"))
    assert completion.logprobs is not None
    assert completion.logprobs[0][ids("a")[0]].decoded_token is None


def test_without_a_tokenizer_there_is_no_text():
    harness = Harness(tokenizer=None)
    harness.add(prompt=[1, 2])
    (first,) = harness.step(out([5], finish="length"))
    assert (first.outputs[0].text, first.outputs[0].token_ids, first.prompt) == ("", [5], None)


# --- stops -------------------------------------------------------------------------------------------------


def test_a_stop_token_has_no_text_unless_asked_for():
    for include, text in ((False, "a"), (True, "ab")):
        harness = Harness()
        harness.add(stop_token_ids=ids("b"), include_stop_str_in_output=include)
        (final,) = harness.step(out(ids("ab"), finish="stop", stop_reason=ids("b")[0]))
        assert (final.outputs[0].text, final.outputs[0].token_ids) == (text, ids("ab"))
        assert final.outputs[0].stop_reason == ids("b")[0]


def test_special_tokens_that_a_parser_needs_are_shown():
    for shown, text in (([EOS], "a<eos>b"), (None, "ab")):
        harness = Harness()
        harness.add(shown_special_tokens=shown, ignore_eos=True)
        (final,) = harness.step(out([*ids("a"), EOS, *ids("b")], finish="length"))
        assert final.outputs[0].text == text


def test_the_end_of_sequence_token_has_no_stop_reason():
    harness = Harness()
    harness.add()
    (final,) = harness.step(out([*ids("a"), EOS], finish="stop"))
    completion = final.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", None)


def test_a_stop_string_across_tokens_ends_the_request_here_and_in_the_core():
    harness = Harness()
    harness.add(stop=["END"], output_kind=DELTA)
    texts = [harness.step(out(ids(t)))[0].outputs[0].text for t in ("abE", "N")]
    assert texts == ["ab", ""]
    (final,) = harness.step(out(ids("Dxyz")))
    completion = final.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "END")
    assert completion.token_ids == ids("D"), "what came with it is dropped"
    assert harness.aborted == ["r"]
    assert harness.step(out(ids("late"))) == [], "outputs that were under way are dropped"


def test_a_stop_string_counts_even_when_the_core_ended_in_the_same_step():
    harness = Harness()
    harness.add(stop=["END"])
    (final,) = harness.step(out(ids("xEND"), finish="length"))
    assert (final.outputs[0].text, final.outputs[0].finish_reason) == ("x", "stop")
    assert harness.aborted == []


def test_text_held_for_a_stop_string_is_shown_at_the_end():
    harness = Harness()
    harness.add(stop=["END"], output_kind=DELTA)
    assert harness.step(out(ids("xEN")))[0].outputs[0].text == "x"
    assert harness.step(out(ids("E"), finish="length"))[0].outputs[0].text == "ENE"


def test_stop_strings_are_not_looked_for_before_min_tokens():
    harness = Harness()
    harness.add(stop=["b"], min_tokens=3, max_tokens=9)
    assert harness.step(out(ids("abb")))[0].outputs[0].finish_reason is None
    (final,) = harness.step(out(ids("b")))
    assert (final.outputs[0].text, final.outputs[0].stop_reason) == ("abb", "b")


def test_including_the_stop_string():
    harness = Harness()
    harness.add(stop=["END"], include_stop_str_in_output=True)
    (final,) = harness.step(out(ids("xENDy")))
    assert final.outputs[0].text == "xEND"


def test_a_stop_string_in_one_completion_leaves_the_others():
    harness = Harness()
    harness.add(n=2, temperature=1.0, stop=["."])
    harness.step(out(ids("a."), "0_r"), out(ids("b"), "1_r"))
    assert harness.aborted == ["0_r"]
    (final,) = harness.step(out(ids("c"), "1_r", "length"))
    assert [(c.text, c.finish_reason) for c in final.outputs] == [("a", "stop"), ("bc", "length")]


# --- log probabilities -------------------------------------------------------------------------------------


def test_logprobs_put_the_chosen_token_first_with_its_rank():
    harness = Harness()
    harness.add(logprobs=2)
    a, b, c = ids("abc")
    (final,) = harness.step(out([a], finish="length", new_logprobs=logprobs_of([a], [b, c])))
    completion = final.outputs[0]
    assert completion.logprobs is not None
    assert list(completion.logprobs[0]) == [a, b, c]
    assert [lp.rank for lp in completion.logprobs[0].values()] == [3, 1, 2]
    assert [lp.decoded_token for lp in completion.logprobs[0].values()] == ["a", "b", "c"]
    assert completion.cumulative_logprob == -0.5


def test_a_chosen_token_among_the_most_likely_is_listed_once():
    harness = Harness()
    harness.add(logprobs=2)
    a, b = ids("ab")
    entry = TokenLogprobs([a, b, a], [-0.5, -0.1, -0.5], 2)
    (final,) = harness.step(out([a], finish="length", new_logprobs=[entry]))
    assert final.outputs[0].logprobs is not None
    assert [(t, lp.rank) for t, lp in final.outputs[0].logprobs[0].items()] == [(a, 2), (b, 1)]


def test_tokens_inside_a_character_decode_with_the_text_so_far():
    harness = Harness()
    harness.add(logprobs=1, max_tokens=9)
    token_ids = ids("é!")
    text = [
        harness.step(out([t], new_logprobs=logprobs_of([t], ids("z"))))[0].outputs[0].logprobs[-1]
        for t in token_ids
    ]
    assert [position[t].decoded_token for position, t in zip(text, token_ids)] == ["", "é", "!"]
    assert [position[ids("z")[0]].decoded_token for position in text] == ["z", "z", "z"]


def test_special_tokens_are_named_in_logprobs():
    harness = Harness()
    harness.add(logprobs=0)
    (final,) = harness.step(out([EOS], finish="stop", new_logprobs=logprobs_of([EOS])))
    assert final.outputs[0].text == ""
    assert final.outputs[0].logprobs is not None
    assert final.outputs[0].logprobs[0][EOS].decoded_token == "<eos>"


def test_logprobs_that_nobody_asked_for_are_left_out():
    harness = Harness()
    harness.add()
    (final,) = harness.step(out(ids("a"), finish="length", new_logprobs=logprobs_of(ids("a"))))
    assert (final.outputs[0].logprobs, final.outputs[0].cumulative_logprob) == (None, None)


def test_prompt_logprobs_come_in_chunks_and_start_with_none():
    harness = Harness()
    harness.add(prompt="héy", prompt_logprobs=0, output_kind=DELTA, max_tokens=9)
    prompt = ids("héy")
    assert harness.step(out([], prompt_logprobs=logprobs_of(prompt[1:2]))) == []
    (first,) = harness.step(out(ids("a"), prompt_logprobs=logprobs_of(prompt[2:])))
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    scored = [position[token] for token, position in zip(prompt[1:], first.prompt_logprobs[1:]) if position]
    assert [lp.decoded_token for lp in scored] == ["", "é", "y"]
    (second,) = harness.step(out(ids("b"), finish="length"))
    assert second.prompt_logprobs is None, "a delta holds them once"


def test_prompt_logprobs_of_a_single_token_are_none_alone():
    harness = Harness()
    harness.add(prompt="h", prompt_logprobs=1)
    (final,) = harness.step(out(ids("a"), finish="length"))
    assert final.prompt_logprobs == [None]


def test_prompt_logprobs_are_asked_for_once_with_n():
    harness = Harness()
    request = harness.input.process("r", "Hi", SamplingParams(n=3, temperature=1.0, prompt_logprobs=1))
    assert [core.sampling_params.prompt_logprobs for core in request.core_requests] == [1, None, None]


# --- ends --------------------------------------------------------------------------------------------------


def test_an_id_in_use_is_refused():
    harness = Harness()
    harness.add("r", n=2, temperature=1.0)
    for taken in ("r", "0_r"):
        with pytest.raises(InvalidRequestError, match="in use") as error:
            harness.add(taken)
        assert error.value.param == "request_id"
    assert harness.output.num_unfinished == 1


def test_abort_names_what_still_runs():
    harness = Harness()
    harness.add(n=2, temperature=1.0)
    harness.step(out(ids("a"), "0_r", "length"))
    assert harness.output.abort_requests(["unknown", "r"]) == ["1_r"]
    assert harness.output.abort_requests(["r"]) == []
    assert not harness.output.has_unfinished
    assert harness.step(out(ids("b"), "1_r")) == []


def test_a_failed_completion_fails_its_request_and_drops_its_siblings():
    harness = Harness()
    harness.add("r", n=2, temperature=1.0)
    harness.add("other")
    results = harness.step(
        out(ids("a"), "1_r"), out([], "0_r", "error", error="boom"), out(ids("x"), "other", "length")
    )
    assert [result.request_id for result in results] == ["other"]
    assert harness.aborted == ["1_r"]
    ((request_id, error),) = harness.failures
    assert request_id == "r"
    assert isinstance(error, RequestFailedError)
    assert "boom" in str(error)
    assert not harness.output.has_unfinished


def test_times_and_counts_of_a_request():
    harness = Harness()
    harness.add(output_kind=FINAL_ONLY)
    harness.step(out(ids("a"), first_scheduled_time=1.5, num_cached_tokens=16), at=2.0)
    (final,) = harness.step(out(ids("bc"), finish="length", num_preemptions=1), at=3.0)
    times = final.metrics
    assert times is not None
    assert (times.arrival_time, times.first_scheduled_time) == (1.0, 1.5)
    assert (times.first_token_time, times.last_token_time) == (2.0, 3.0)
    assert (times.num_generation_tokens, times.num_preemptions) == (3, 1)
    assert final.num_cached_tokens == 16


def test_metrics_are_fed():
    metrics = EngineMetrics("m", 1000)
    harness = Harness(metrics=metrics)
    harness.add("r", n=2, temperature=1.0)
    harness.add("failed")
    harness.add("aborted")
    harness.step(out(ids("a"), "0_r", "length"), out(ids("b"), "1_r"), out([], "failed", error="x"), at=2.0)
    harness.step(out(ids("cd"), "1_r", "stop"), at=3.5)
    harness.output.abort_requests(["aborted"])
    registry = metrics.registry
    labels = {"model_name": "m", "engine": "0"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"jaxserve:{name}", {**labels, **more})

    assert value("generation_tokens_total") == 4
    assert value("prompt_tokens_total") == 2, "a prompt counts once, whatever n"
    assert value("time_to_first_token_seconds_sum") == 1.0
    assert value("inter_token_latency_seconds_sum") == 1.5
    for reason in ("stop", "error", "abort"):
        assert value("request_success_total", finished_reason=reason) == 1


# --- queues ------------------------------------------------------------------------------------------------


def test_a_slow_reader_gets_merged_deltas():
    async def main() -> None:
        harness, queue = Harness(), RequestOutputQueue()
        harness.add(queue=queue, output_kind=DELTA)
        assert queue.get_nowait() is None
        for character in "Hello":
            assert harness.step(out(ids(character))) == []
        output = await queue.get()
        assert output is not None
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("Hello", ids("Hello"))
        harness.step(out(ids("!"), finish="length"))
        rest = [output async for output in queue]
        assert [(o.outputs[0].text, o.finished) for o in rest] == [("!", True)]
        assert await queue.get() is None

    asyncio.run(main())


def test_a_waiting_reader_is_woken():
    async def main() -> None:
        harness, queue = Harness(), RequestOutputQueue()
        harness.add(queue=queue, output_kind=DELTA)
        reader = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        harness.step(out(ids("a")))
        output = await asyncio.wait_for(reader, 1)
        assert output is not None
        assert output.outputs[0].text == "a"

    asyncio.run(main())


def test_a_cancelled_reader_can_be_followed_by_another():
    async def main() -> None:
        harness, queue = Harness(), RequestOutputQueue()
        harness.add(queue=queue, output_kind=DELTA)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(queue.get(), 0.01)
        harness.step(out(ids("a")))
        output = await asyncio.wait_for(queue.get(), 1)
        assert output is not None
        assert output.outputs[0].text == "a"

    asyncio.run(main())


def test_readers_get_what_came_before_an_error():
    async def main() -> None:
        harness, queue = Harness(), RequestOutputQueue()
        harness.add(queue=queue, output_kind=DELTA)
        harness.step(out(ids("a")))
        harness.step(out([], error="boom"))
        output = await queue.get()
        assert output is not None
        assert output.outputs[0].text == "a"
        for _ in range(2):
            with pytest.raises(RequestFailedError, match="boom"):
                await queue.get()

    asyncio.run(main())


def test_the_core_s_death_reaches_every_reader():
    async def main() -> None:
        harness = Harness()
        queues = [RequestOutputQueue() for _ in range(3)]
        for index, queue in enumerate(queues):
            harness.add(f"r{index}", queue=queue)
        readers = [asyncio.create_task(queue.get()) for queue in queues]
        await asyncio.sleep(0)
        harness.output.fail_all(EngineDeadError("gone"))
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        assert not harness.output.has_unfinished

    asyncio.run(main())


def test_abort_ends_a_stream_with_the_text_that_was_held():
    async def main() -> None:
        harness, queue = Harness(), RequestOutputQueue()
        harness.add(queue=queue, output_kind=DELTA, stop=["END"])
        harness.step(out(ids("xEN")))
        harness.output.abort_requests(["r"])
        (output,) = [output async for output in queue]
        assert output.finished
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("xEN", "abort")

    asyncio.run(main())


def test_final_only_queues_give_one_output():
    async def main() -> None:
        harness, queue = Harness(), RequestOutputQueue()
        harness.add(queue=queue, output_kind=FINAL_ONLY)
        harness.step(out(ids("a")))
        assert queue.get_nowait() is None
        harness.step(out(ids("b"), finish="length"))
        assert [o.outputs[0].text async for o in queue] == ["ab"]

    asyncio.run(main())


# --- streamed equals whole ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(0, 256), min_size=1, max_size=24),
    st.lists(st.text("ab,é", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 6),
    st.lists(st.integers(1, 5), min_size=24, max_size=24),
    st.data(),
)
def test_streams_of_any_step_size_equal_the_whole(token_ids, stop, include, skip, min_tokens, sizes, data):
    token_ids = [*token_ids, *ids(data.draw(st.text("ab,é", max_size=8)))]
    params = {
        "stop": stop,
        "include_stop_str_in_output": include,
        "skip_special_tokens": skip,
        "min_tokens": min_tokens,
        "max_tokens": 100,
    }

    def run(kind: RequestOutputKind, sizes: list[int]) -> tuple[str, Any, Any]:
        harness = Harness()
        harness.add(output_kind=kind, **params)
        text, at, completion = "", 0, None
        for size in sizes:
            part = token_ids[at : at + size]
            at += size
            for result in harness.step(out(part, finish="length" if at >= len(token_ids) else None)):
                completion = result.outputs[0]
                text = text + completion.text if kind is DELTA else completion.text
            if at >= len(token_ids) or not harness.output.has_unfinished:
                break
        assert completion is not None
        return text, completion.finish_reason, completion.stop_reason

    ones = [1] * len(token_ids)
    whole = run(FINAL_ONLY, [len(token_ids)])
    assert run(DELTA, ones) == run(CUMULATIVE, ones) == run(DELTA, [*sizes, len(token_ids)]) == whole
    if whole[1] == "length":
        assert whole[0] == TOKENIZER.backend.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("seed", range(6))
def test_outputs_that_end_nothing_are_taken_like_any(seed):
    """The way written out for most outputs gives what the general one does, metrics included."""
    rng = random.Random(seed)
    harnesses = [Harness(metrics=EngineMetrics("m", 1000)) for _ in range(2)]
    made, running = 0, {}
    for step in range(60):
        if made < 40 and rng.random() < 0.7:
            params = {
                "n": rng.choice((1, 1, 2)), "temperature": 1.0, "output_kind": rng.choice((*RequestOutputKind,)),
                "stop": rng.choice((None, None, "ab")), "logprobs": rng.choice((None, None, 1)),
                "detokenize": True, "min_tokens": rng.choice((0, 3)), "max_tokens": 500,
                "prompt_logprobs": rng.choice((None, 1)),
            }  # fmt: skip
            if params["stop"] is None:
                params["detokenize"] = rng.random() < 0.7
            for harness in harnesses:
                harness.add(f"r{made}", **params)
            completions = harnesses[1].output._requests[f"r{made}"].completions
            for completion in completions:
                completion.plain = False
            running |= {completion.core_id: params for completion in completions}
            made += 1
        outputs = [
            random_output(rng, core_id, params) for core_id, params in running.items() if rng.random() < 0.9
        ]
        results = [harness.step(*outputs, at=2.0 + step / 4) for harness in harnesses]
        assert results[0] == results[1]
        assert harnesses[0].aborted == harnesses[1].aborted
        assert list(map(repr, harnesses[0].failures)) == list(map(repr, harnesses[1].failures))
        assert harnesses[0].output._completions.keys() == harnesses[1].output._completions.keys()
        running = {key: value for key, value in running.items() if key in harnesses[0].output._completions}
    snapshots = [harness.output.metrics.snapshot() for harness in harnesses]
    assert without_times(snapshots[0]) == without_times(snapshots[1])
    assert made > 20


def test_a_traced_request_s_detokenizing_is_timed():
    harness = Harness(tracer=object())
    harness.add(output_kind=CUMULATIVE)
    harness.step(out(ids("a")))
    (output,) = harness.step(out(ids("b")))
    before = output.metrics.detokenize_seconds
    (output,) = harness.step(out(ids("c")))
    assert output.metrics.detokenize_seconds > before > 0


def random_output(rng: random.Random, core_id: str, params: dict[str, Any]) -> EngineCoreOutput:
    """What a core might say: mostly one token, sometimes several, an end, an error or nothing but log probabilities."""
    if rng.random() < 0.02:
        reason = rng.choice((None, FinishReason.ERROR))
        return EngineCoreOutput(core_id, rng.choice(([], [5])), finish_reason=reason, error="broken")
    if rng.random() < 0.05:
        return out(rng.choice(([], [5])), core_id, prompt_logprobs=logprobs_of([5]))
    token_ids = ids("".join(rng.choices("ab é€", k=rng.choice((1, 1, 1, 2, 4)))))[: rng.choice((1, 1, 2, 4))]
    return out(
        token_ids, core_id, rng.choices((None, "stop", "length"), (0.94, 0.03, 0.03))[0],
        new_logprobs=logprobs_of(token_ids) if params["logprobs"] or rng.random() < 0.1 else None,
        num_preemptions=rng.choice((0, 0, 0, 2)), num_cached_tokens=rng.choice((0, 4)), first_scheduled_time=1.5,
    )  # fmt: skip


def without_times(metrics: Sequence[Any]) -> list[Any]:
    return [metric for metric in metrics if not metric.name.endswith("_created")]

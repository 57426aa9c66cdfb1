"""Requests with grammars in the scheduler: who waits for whom, jumps, preemption, and every way to end."""

from __future__ import annotations

import random
import threading
import time

import pytest
from scheduler_harness import EOS, VOCAB_SIZE, Harness, Result

from jaxserve.request import RequestStatus
from jaxserve.step import FinishReason
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.interface import GrammarBackend
from jaxserve.structured_output.llguidance_backend import LLGuidanceBackend
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.structured_outputs_params import StructuredOutputsParams

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789-.!?,"
FIRST = 5
TOKENS = [b""] * FIRST + [character.encode() for character in CHARACTERS] + [b"hello", b"lo", b"ell"]
TOKENS += [b""] * (VOCAB_SIZE - len(TOKENS))


def text_of(token_ids: list[int]) -> str:
    return b"".join(TOKENS[i] for i in token_ids if i != EOS).decode()


def encode(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        piece = max((t for t in TOKENS if t and text.encode().startswith(t)), key=len)
        ids.append(TOKENS.index(piece))
        text = text[len(piece) :]
    return ids


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(Vocabulary(TOKENS, [EOS], [EOS], None, encode))


@pytest.fixture(scope="module")
def compiler(backend: LLGuidanceBackend):
    compiler = GrammarCompiler(lambda: backend)
    yield compiler
    compiler.close()


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def run(compiler: GrammarCompiler, depth: int = 0, **params: object) -> Result:
    """One request alone, until it ends."""
    harness = Harness(depth=depth, compiler=compiler)
    harness.add("r", [7, 8, 9], **{"max_tokens": 50, **params})
    settle(harness)
    return harness.results["r"]


def settle(harness: Harness) -> None:
    while harness.scheduler.has_unfinished():
        if not harness.step().num_scheduled_tokens and not harness.in_flight:
            harness.scheduler.wait_for_grammar(0.01)
    harness.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_output_is_in_the_language(compiler, depth):
    result = run(compiler, depth, structured_outputs=regex("[a-c]{3}-[0-9]{2}"))
    assert result.finish_reason is FinishReason.STOP
    assert result.stop_reason is None
    assert result.token_ids[-1] == EOS
    text = text_of(result.token_ids)
    assert len(text) == 6
    assert text[3] == "-"


def test_forced_tokens_cost_no_steps_and_change_nothing(compiler):
    """Log probabilities need every token's logits: with them nothing is jumped over."""
    pattern = "(hello-world|abc)-[0-9]x-y-z"
    jumped = run(compiler, structured_outputs=regex(pattern))
    stepped = run(compiler, structured_outputs=regex(pattern), logprobs=0)
    assert text_of(jumped.token_ids) == text_of(stepped.token_ids)
    assert len(jumped.outputs) < len(stepped.outputs)
    assert len(stepped.outputs) == len(stepped.token_ids)
    assert max(len(output.new_token_ids) for output in jumped.outputs) > 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_jumps_fill_the_padding_of_a_step_and_no_more(compiler, ranks):
    """Eight rows fill a step of eight; two more make one of sixteen, and then there is room. On each rank."""
    widest = {}
    for num_free in (7, 9):
        harness = Harness(
            num_blocks=200,
            compiler=compiler,
            max_num_seqs=16,
            max_num_batched_tokens=48,
            data_parallel_size=ranks,
        )
        harness.add("c", [7, 8], structured_outputs=regex("[ab]-x-y-z[ab]"), max_tokens=40)
        harness.requests["c"].grammar.future.result(20)
        for index in range(num_free * ranks):
            harness.add(f"free{index}", [7, 8, 9 + index], max_tokens=30, ignore_eos=True)
        steps = [harness.step() for _ in range(25)]
        widest[num_free] = max(step.num_scheduled_tokens.get("c", 0) for step in steps[1:])
        size = 8 if num_free == 7 else 16
        assert all(step.total_num_scheduled_tokens <= size * ranks for step in steps[1:])
        settle(harness)
        assert text_of(harness.results["c"].token_ids)[1:7] == "-x-y-z"
    assert widest[7] == 1
    assert widest[9] == 7


def test_a_single_choice_takes_one_step(compiler):
    result = run(compiler, structured_outputs=StructuredOutputsParams(choice=["hello-there"]))
    assert text_of(result.token_ids) == "hello-there"
    assert len(result.outputs) == 1
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_max_tokens_cuts_a_jump(compiler, max_tokens):
    result = run(compiler, structured_outputs=regex("a-b-c-d-e-f"), max_tokens=max_tokens)
    assert len(result.token_ids) == max_tokens
    assert result.finish_reason is FinishReason.LENGTH


def test_a_stop_token_inside_a_jump_ends_it(compiler):
    stop = encode("-")[0]
    result = run(compiler, structured_outputs=regex("ab-cd"), stop_token_ids=[stop])
    assert text_of(result.token_ids) == "ab-"
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)


def test_min_tokens_holds_as_long_as_the_grammar_goes_on(compiler):
    free = run(compiler, structured_outputs=regex("a{1,30}"), min_tokens=20)
    assert len(free.token_ids) >= 20
    bound = run(compiler, structured_outputs=regex("[ab]{2}"), min_tokens=20)
    assert len(text_of(bound.token_ids)) == 2
    assert bound.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on_as_long_as_the_grammar_does(compiler):
    result = run(compiler, structured_outputs=regex("[ab]{0,12}"), ignore_eos=True)
    assert len(text_of(result.token_ids)) == 12
    assert result.finish_reason is FinishReason.STOP


def test_a_broken_grammar_fails_its_request_alone(compiler):
    harness = Harness(compiler=compiler)
    harness.add("bad", [7, 8], structured_outputs=regex("("))
    harness.add("good", [7, 8, 9])
    settle(harness)
    output = harness.results["bad"].outputs[-1]
    assert output.finish_reason is FinishReason.ERROR
    assert output.invalid_param == "structured_outputs.regex"
    harness.check_result("good")


class SlowBackend:
    """Compiles when told to."""

    def __init__(self, inner: GrammarBackend) -> None:
        self.inner, self.go = inner, threading.Event()
        self.eos_token_ids, self.num_words = inner.eos_token_ids, inner.num_words

    def compile(self, params):
        assert self.go.wait(20)
        return self.inner.compile(params)

    def fill_masks(self, matchers, masks):
        self.inner.fill_masks(matchers, masks)


def test_nobody_waits_behind_a_grammar_that_is_being_compiled(backend):
    slow = SlowBackend(backend)
    compiler = GrammarCompiler(lambda: slow)
    harness = Harness(compiler=compiler)
    constrained = harness.add("c", [7, 8], structured_outputs=regex("[ab]{4}"))
    harness.add("free", [7, 8, 9])
    while harness.results["free"].finish_reason is None:
        harness.step()
    harness.check_result("free")
    assert constrained.status is RequestStatus.WAITING_FOR_GRAMMAR
    assert harness.scheduler.stats().num_waiting == 1
    slow.go.set()
    settle(harness)
    assert len(text_of(harness.results["c"].token_ids)) == 4
    compiler.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_one_token_that_is_left_of_a_prompt_is_not_held_back_for_ever(compiler, depth):
    harness = Harness(depth=depth, compiler=compiler, max_num_batched_tokens=8)
    request = harness.add("c", [7] * 9, structured_outputs=regex("[ab]{4}"))
    request.grammar.future.result(20)
    for _ in range(20):
        harness.step()
    assert len(text_of(harness.results["c"].token_ids)) == 4


def test_a_compiled_request_has_its_place_in_the_queue(backend):
    slow = SlowBackend(backend)
    compiler = GrammarCompiler(lambda: slow)
    harness = Harness(compiler=compiler, max_num_seqs=1)
    harness.add("running", [7, 8], max_tokens=30)
    harness.step()
    harness.add("c", [7, 8], structured_outputs=regex("[ab]{4}"))
    harness.add("later", [7, 8, 9])
    slow.go.set()
    harness.requests["c"].grammar.future.result(20)
    settle(harness)
    first = {name: harness.requests[name].first_scheduled_time for name in ("running", "c", "later")}
    assert first["running"] < first["c"] < first["later"]
    compiler.close()


def test_abort_while_the_grammar_is_compiled(backend):
    slow = SlowBackend(backend)
    compiler = GrammarCompiler(lambda: slow)
    harness = Harness(compiler=compiler)
    harness.add("c", [7, 8], structured_outputs=regex("[ab]{4}"))
    harness.step()
    harness.scheduler.abort(["c"])
    slow.go.set()
    harness.check_idle()
    compiler.close()


def test_a_grammar_that_takes_too_long_fails_its_request(backend):
    slow = SlowBackend(backend)
    compiler = GrammarCompiler(lambda: slow, seconds=0.05)
    harness = Harness(compiler=compiler)
    harness.add("c", [7, 8], structured_outputs=regex("[ab]{4}"))
    time.sleep(0.1)
    harness.step()
    assert "too long" in harness.results["c"].error
    slow.go.set()
    harness.check_idle()
    compiler.close()


@pytest.mark.parametrize("separate_paths", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_requests_go_on_where_they_were(compiler, depth, separate_paths):
    patterns = {f"r{i}": f"([a-c][0-9]-){{{6 + i}}}end" for i in range(6)}
    alone = {}
    for name, pattern in patterns.items():
        harness = Harness(compiler=compiler, separate_paths=separate_paths)
        harness.add(name, [7, 8, 9], structured_outputs=regex(pattern), max_tokens=60)
        settle(harness)
        alone[name] = harness.results[name].token_ids
    tight = Harness(num_blocks=16, depth=depth, compiler=compiler, separate_paths=separate_paths)
    for name, pattern in patterns.items():
        tight.add(name, [7, 8, 9], structured_outputs=regex(pattern), max_tokens=60)
    settle(tight)
    assert tight.scheduler.stats().num_preemptions > 0
    assert {name: result.token_ids for name, result in tight.results.items()} == alone


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("concurrency", [1, 16, 64])
def test_free_requests_do_not_notice_constrained_ones(compiler, depth, concurrency):
    rng = random.Random(concurrency)
    harness = Harness(
        num_blocks=400,
        depth=depth,
        compiler=compiler,
        max_num_seqs=max(8, concurrency),
        max_num_batched_tokens=96,
    )
    for index in range(concurrency):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
        harness.add(f"free{index}", prompt, max_tokens=rng.randrange(1, 20))
        harness.add(
            f"c{index}", prompt, structured_outputs=regex(f"[a-f]{{{1 + index % 7}}}-x-y-z"), max_tokens=30
        )
    settle(harness)
    for index in range(concurrency):
        harness.check_result(f"free{index}")
        text = text_of(harness.results[f"c{index}"].token_ids)
        assert text.endswith("-x-y-z")


def test_free_rows_keep_two_steps_in_flight(compiler):
    """A constrained row waits for its token to be read; the free one is in every step."""
    harness = Harness(depth=1, compiler=compiler)
    harness.add("c", [7, 8], structured_outputs=regex("[a-f]{12}"), max_tokens=40)
    harness.requests["c"].grammar.future.result(20)
    harness.add("free", [7, 8, 9], max_tokens=12, ignore_eos=True)
    steps = [harness.step() for _ in range(8)]
    assert all("free" in step.num_scheduled_tokens for step in steps)
    assert 3 <= sum("c" in step.num_scheduled_tokens for step in steps) <= 5
    settle(harness)


def test_prompt_logprobs_of_a_constrained_request(compiler):
    result = run(compiler, structured_outputs=regex("[ab]{3}"), prompt_logprobs=1)
    assert sum(len(output.prompt_logprobs or []) for output in result.outputs) == 2


def test_repetition_detection_sees_appended_tokens(compiler):
    from jaxserve.sampling_params import RepetitionDetection

    result = run(
        compiler,
        structured_outputs=regex("(ab){20}"),
        repetition_detection=RepetitionDetection(max_pattern_size=2, min_count=3),
    )
    assert result.finish_reason is FinishReason.REPETITION
    assert text_of(result.token_ids) == "ababab"


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_and_aborts_leave_nothing_behind(compiler, seed):
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=24,
        depth=seed % 2,
        compiler=compiler,
        max_num_batched_tokens=16,
        data_parallel_size=1 + seed // 2,
        separate_paths=seed % 3 > 0,
    )
    constrained = ["[a-c]{2,9}", "(abc-){1,4}!", "hello-hello-hello", "[0-9]+\\.[0-9]{2}", "(", "[ab]?"]
    names: list[str] = []
    for index in range(60):
        name = f"r{index}"
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 14))]
        params = {"max_tokens": rng.randrange(1, 25), "ignore_eos": rng.random() < 0.2}
        if rng.random() < 0.7:
            params["structured_outputs"] = regex(rng.choice(constrained))
        harness.add(name, prompt, **params)
        names.append(name)
        for _ in range(rng.randrange(4)):
            harness.step()
        if rng.random() < 0.3:
            victim = rng.choice(names)
            harness.scheduler.abort([victim])
        harness.check_pool()
    settle(harness)
    harness.check_idle()

"""LLM on a tiny model: one answer under every batching, each sampling parameter's effect, nothing left behind."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import ENGINE, TIGHT

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError, EngineDeadError, InvalidRequestError, OutOfMemoryError
from jaxserve.outputs import RequestOutput

pytestmark = pytest.mark.device

VOCAB = 320
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


def random_prompts(num: int, seed: int = 0, longest: int = 70) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(8, VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(num)]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(output: RequestOutput) -> np.ndarray:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return np.array([p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids)])


def assert_pool_full(llm: LLM) -> None:
    stats = llm._core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert stats.num_compilations == 0


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(20)


@pytest.fixture(scope="module")
def alone(make_llm, prompts) -> list[RequestOutput]:
    """Each prompt by itself, without prefix caching."""
    llm = make_llm(enable_prefix_caching=False)
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"enable_prefix_caching": False},
        {"async_scheduling": False},
        TIGHT,
        {"max_num_batched_tokens": 8},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
        {"max_num_seqs": 1, "max_num_batched_tokens": 16},
    ],
    ids=lambda arguments: ",".join(arguments) or "default",
)
def test_same_answer_under_every_batching(make_llm, prompts, alone, arguments):
    llm = make_llm(**arguments)
    for _ in range(2):  # the second time the prefix cache is warm
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert tokens(outputs) == tokens(alone)
        for output, expected in zip(outputs, alone):
            np.testing.assert_allclose(logprobs(output), logprobs(expected), atol=1e-4)
    if "num_gpu_blocks_override" in arguments:
        assert llm._core.scheduler.stats().num_preemptions > 0
    assert_pool_full(llm)


def test_prefix_cache_is_hit_and_counted(make_llm):
    llm = make_llm()
    llm.reset_prefix_cache()
    prompt = random_prompts(1, seed=77)[0] * 3
    first = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    second = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(prompt) - 1) // 8 * 8
    assert tokens([first]) == tokens([second])


def test_seeded_sampling_does_not_depend_on_company(make_llm, prompts):
    llm = make_llm()
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=1234, max_tokens=12, ignore_eos=True)
    alone = llm.generate(prompts[0], params, use_tqdm=False)
    others = [SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)] * 7
    together = llm.generate(prompts[:8], [params, *others], use_tqdm=False)
    assert tokens(together)[0] == tokens(alone)[0]
    other_seed = llm.generate(prompts[0], params.clone(seed=4321), use_tqdm=False)
    assert tokens(other_seed) != tokens(alone)


def test_n_completions_differ_and_are_in_order(make_llm, prompts):
    output = make_llm().generate(
        prompts[0],
        SamplingParams(n=4, temperature=1.5, seed=5, max_tokens=8, ignore_eos=True),
        use_tqdm=False,
    )[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4


def test_logit_bias_allowed_and_bad_tokens(make_llm, prompts):
    llm = make_llm()
    (biased,) = llm.generate(prompts[0], GREEDY.clone(logit_bias={42: 100.0}), use_tqdm=False)
    assert biased.outputs[0].token_ids == [42] * 12
    (allowed,) = llm.generate(prompts[0], GREEDY.clone(allowed_token_ids=[9, 11]), use_tqdm=False)
    assert set(allowed.outputs[0].token_ids) <= {9, 11}
    tokenizer = llm.get_tokenizer()
    letters = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "bcdfghjkmnpqrvwxz"]
    spelt = GREEDY.clone(allowed_token_ids=letters, max_tokens=20)
    (free,) = llm.generate(prompts[0], spelt, use_tqdm=False)
    text = free.outputs[0].text
    pairs = [text[i : i + 2] for i in range(2, 18)]
    word = next(w for w in pairs if len(tokenizer.encode(w, add_special_tokens=False)) == 2)
    (without,) = llm.generate(prompts[0], spelt.clone(bad_words=[word]), use_tqdm=False)
    assert word not in without.outputs[0].text
    assert without.outputs[0].text[: text.index(word) + 1] == text[: text.index(word) + 1]


def test_penalties_change_repetition(make_llm, prompts):
    llm = make_llm()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    plain = (
        llm.generate(prompts[1], params.clone(logit_bias={7: 3.0}), use_tqdm=False)[0].outputs[0].token_ids
    )
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 3.0}):
        penalised = llm.generate(prompts[1], params.clone(logit_bias={7: 3.0}, **penalty), use_tqdm=False)
        ids = penalised[0].outputs[0].token_ids
        assert len(set(ids)) > len(set(plain)), penalty


def test_min_tokens_and_stop_tokens(make_llm, prompts):
    llm = make_llm()
    free = llm.generate(prompts[2], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stop = free[4]
    first = free.index(stop)
    (stopped,) = llm.generate(prompts[2], GREEDY.clone(stop_token_ids=[stop]), use_tqdm=False)
    assert stopped.outputs[0].token_ids == free[: first + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    (later,) = llm.generate(prompts[2], GREEDY.clone(stop_token_ids=[stop], min_tokens=8), use_tqdm=False)
    assert stop not in later.outputs[0].token_ids[:8]
    assert len(later.outputs[0].token_ids) >= 8


def test_stop_string_across_tokens(make_llm, prompts):
    llm = make_llm()
    (free,) = llm.generate("The cat sat on the mat", GREEDY.clone(max_tokens=20), use_tqdm=False)
    text = free.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (stopped,) = llm.generate(
        "The cat sat on the mat", GREEDY.clone(max_tokens=20, stop=stop), use_tqdm=False
    )
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop
    assert_pool_full(llm)


def test_prompt_logprobs_equal_under_chunking(make_llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    whole = make_llm(enable_chunked_prefill=False, max_num_batched_tokens=128).generate(
        prompts, params, use_tqdm=False
    )
    chunked = make_llm(max_num_batched_tokens=8).generate(prompts, params, use_tqdm=False)
    for prompt, a, b in zip(prompts, whole, chunked):
        assert a.prompt_logprobs is not None
        assert b.prompt_logprobs is not None
        assert len(a.prompt_logprobs) == len(b.prompt_logprobs) == len(prompt)
        assert a.prompt_logprobs[0] is None
        for token, x, y in zip(prompt[1:], a.prompt_logprobs[1:], b.prompt_logprobs[1:]):
            assert x is not None
            assert y is not None
            assert 3 <= len(x) <= 4
            assert x[token].logprob == pytest.approx(y[token].logprob, abs=1e-4)
            assert (
                x[token].rank == sum(1 for p in x.values() if p.logprob > x[token].logprob) + 1
                or x[token].rank > 3
            )


def test_whole_vocabulary_of_logprobs(make_llm, prompts):
    llm = make_llm(max_logprobs=-1, max_num_seqs=1, max_num_batched_tokens=8)
    (output,) = llm.generate(
        prompts[0],
        SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1),
        use_tqdm=False,
    )
    assert output.outputs[0].logprobs is not None
    for position in output.outputs[0].logprobs:
        assert len(position) == VOCAB
        assert sum(np.exp(p.logprob) for p in position.values()) == pytest.approx(1, abs=1e-4)


def test_chat_uses_the_template(make_llm):
    llm = make_llm()
    messages = [{"role": "user", "content": "hello"}]
    one = llm.chat(messages, GREEDY, use_tqdm=False)
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert tokens(two) == tokens(one) * 2
    assert "<|im_start|>" in llm.get_tokenizer().decode(one[0].prompt_token_ids, skip_special_tokens=False)


def test_priority_is_honoured(make_llm, prompts):
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=16)
    outputs = llm.generate(prompts[:4], GREEDY, priority=[3, 2, 1, 0], use_tqdm=False)
    starts = [o.metrics.first_scheduled_time for o in outputs]
    assert starts == sorted(starts, reverse=True)


@pytest.mark.parametrize(
    "prompt,params,named",
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([5] * 2000, {}, "prompt"),
        ([5], {"logprobs": 21}, "logprobs"),
        ([5], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([5], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([5], {"max_tokens": 100_000}, "max_tokens"),
    ],
)
def test_bad_requests_are_refused_by_name_and_change_nothing(make_llm, prompt, params, named):
    llm = make_llm()
    with pytest.raises(InvalidRequestError) as error:
        llm.generate(
            [[7, 8], prompt] if prompt != [1.5] else [[7, 8], [1.5]], SamplingParams(**params), use_tqdm=False
        )
    assert error.value.param == named
    assert_pool_full(llm)
    assert len(llm.generate([7, 8], GREEDY, use_tqdm=False)) == 1


def test_interrupt_leaves_the_engine_usable(make_llm, prompts, monkeypatch):
    llm = make_llm()
    step, calls = llm._core.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert len(llm.generate(prompts[0], GREEDY, use_tqdm=False)) == 1
    while llm._core.has_work():
        llm._core.step()
    assert_pool_full(llm)


def test_a_closed_llm_says_so(tiny_model):
    with LLM(str(tiny_model), **ENGINE) as llm:
        pass
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate([1])


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        ({"max_num_sequences": 3}, ConfigError, "max_num_seqs"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 8}, ConfigError, "max_num_batched_tokens"),
        ({"dtype": "int7"}, ConfigError, "dtype"),
        ({"block_size": 12}, ConfigError, "block_size"),
        ({"trust_remote_code": True}, ConfigError, "trust_remote_code"),
        ({"max_model_len": 10**6}, ConfigError, "max_model_len"),
        ({"kv_cache_memory_bytes": 20_000, "num_gpu_blocks_override": None}, OutOfMemoryError, "missing"),
    ],
)
def test_bad_arguments_are_refused_by_name(tiny_model, arguments, error, message):
    base = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "num_gpu_blocks_override": 300}
    with pytest.raises(error, match=message):
        LLM(str(tiny_model), **{**base, **arguments})


def test_max_model_len_auto_takes_what_fits(tiny_model):
    with LLM(
        str(tiny_model), max_num_seqs=1, max_num_batched_tokens=8, block_size=8, num_gpu_blocks_override=6,
        max_model_len="auto",
    ) as llm:  # fmt: skip
        assert llm._core.info.max_model_len == 40


@pytest.fixture
def sigint_raises() -> Iterator[None]:
    """KeyboardInterrupt on SIGINT, also where a shell started the tests with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [0, 1, 2, 9])
def test_real_interrupts_come_between_steps(make_llm, prompts, monkeypatch, sigint_raises, number):
    """Ctrl-C in the middle of a step is raised after it: the step ends, and the engine stays usable."""
    llm = make_llm()
    expected = tokens(llm.generate(prompts[:4], GREEDY, use_tqdm=False))
    step, completed = llm._core.step, []

    def interrupted():
        if len(completed) == number:
            os.kill(os.getpid(), signal.SIGINT)
        outputs = step()
        completed.append(1)
        return outputs

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert len(completed) == number + 1
    assert tokens(llm.generate(prompts[:4], GREEDY, use_tqdm=False)) == expected
    while llm._core.has_work():
        llm._core.step()
    assert_pool_full(llm)


def test_threads_take_turns(make_llm, prompts):
    llm = make_llm()
    expected = tokens(llm.generate(prompts[:4], GREEDY, use_tqdm=False))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda p: tokens(llm.generate(p, GREEDY, use_tqdm=False))[0], prompts[:4]))
    assert found == expected


@pytest.mark.parametrize("value", [None, 3, {"max_tokens": 3}])
def test_arguments_of_the_wrong_type(make_llm, value):
    llm = make_llm()
    with pytest.raises(InvalidRequestError):
        llm.generate(
            value if not isinstance(value, dict) else [1], value if isinstance(value, dict) else None
        )


@pytest.mark.parametrize(
    "params,named",
    [
        ({"allowed_token_ids": [5], "bad_words": ["!"]}, None),
        ({"allowed_token_ids": [2], "min_tokens": 3, "stop_token_ids": [2]}, "min_tokens"),
        ({"min_tokens": 1000, "max_tokens": None}, "min_tokens"),
        ({"stop": "a" * 2000}, "stop"),
        ({"temperature": 10**400}, "temperature"),
    ],
)
def test_contradictions_and_excesses_are_refused(make_llm, params, named):
    llm = make_llm()
    if named is None:
        bad = llm.get_tokenizer().encode("!", add_special_tokens=False)
        params = {**params, "allowed_token_ids": bad}
        named = "bad_words"
    with pytest.raises(InvalidRequestError) as error:
        llm.generate([1, 2], SamplingParams(**params), use_tqdm=False)
    assert error.value.param == named

"""Whatever is wrong with a request is found, and named, before it is admitted."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jaxserve.engine.input_processor import LONG_TEXT, InputProcessor
from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer
from jaxserve.tokenizer.gguf_tokenizer import set_bos_eos

VOCABULARY = 300
MAX_LEN = 50


def make_tokenizer() -> FastTokenizer:
    """Every byte a token; ``<bos>`` before every text; merges for the words cat, hat and " cat"."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "t"), ("c", "at"), ("h", "at"), ("Ġ", "cat")]
    tokens = alphabet + [left + right for left, right in merges]
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True)])
    set_bos_eos(backend, bos="<bos>", eos=None, special_tokens=[("<bos>", len(tokens))])
    return FastTokenizer(backend, named_tokens={"bos_token": "<bos>"})


TOKENIZER = make_tokenizer()
BOS = TOKENIZER.bos_token_id


def make(tokenizer: FastTokenizer | None = TOKENIZER, **changes: Any) -> InputProcessor:
    settings: dict[str, Any] = {
        "max_model_len": MAX_LEN, "vocab_size": VOCABULARY, "max_logprobs": 20, "eos_token_ids": [7]
    }  # fmt: skip
    return InputProcessor(tokenizer, **{**settings, **changes})


def refused(
    match: str, param: str, prompt: Any = "cat", params: Any = None, **kwargs: Any
) -> InvalidRequestError:
    processor = kwargs.pop("processor", None) or make()
    with pytest.raises(InvalidRequestError, match=match) as error:
        processor.process("r", prompt, params, **kwargs)
    assert error.value.param == param
    return error.value


# --- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["cat", {"prompt": "cat"}])
def test_text_is_tokenized_with_special_tokens(prompt: Any):
    request = make().process("r", prompt)
    assert request.prompt == "cat"
    assert request.prompt_token_ids == [BOS, *TOKENIZER.encode("cat", add_special_tokens=False)]
    bare = make().process("r", prompt, add_special_tokens=False)
    assert bare.prompt_token_ids == request.prompt_token_ids[1:]


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3]), [np.int64(1), 2, 3], {"prompt_token_ids": [1, 2, 3]}],
)
def test_token_ids_are_taken_as_they_are(prompt: Any):
    request = make().process("r", prompt)
    assert request.prompt_token_ids == [1, 2, 3]
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)
    assert request.prompt is None


def test_text_may_stand_beside_its_tokens():
    request = make().process("r", {"prompt": "shown only", "prompt_token_ids": [1]})
    assert (request.prompt, request.prompt_token_ids) == ("shown only", [1])


def test_the_core_request_holds_what_the_core_needs():
    params = SamplingParams(temperature=0.5, max_tokens=3)
    request = make().process("r", [1, 2], params, priority=-3, cache_salt="a+b/c=", arrival_time=5.0)
    (core,) = request.core_requests
    assert (core.request_id, core.prompt_token_ids, core.priority) == ("r", [1, 2], -3)
    assert (core.cache_salt, core.arrival_time, core.eos_token_ids) == ("a+b/c=", 5.0, [7])
    params.temperature = 2.0
    assert core.sampling_params.temperature == 0.5, "the user's object may change afterwards"


@pytest.mark.parametrize("prompt", [[], {"prompt_token_ids": []}, ()])
def test_an_empty_prompt_is_refused(prompt: Any):
    refused("empty", "prompt", prompt)


def test_an_empty_text_without_special_tokens_is_refused():
    refused("empty", "prompt", "", add_special_tokens=False)
    assert make().process("r", "").prompt_token_ids == [BOS]


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([1, True], "item 1 is True"),
        ([1.0], "item 0 is 1.0"),
        ([[1, 2]], r"item 0 is \[1, 2\]"),
        (["a"], "item 0 is 'a'"),
        ([None], "item 0 is None"),
        ([np.bool_(True)], "item 0"),
        (np.array([[1], [2]]), r"item 0 is \[1\]"),
        (np.array([1.5]), "item 0"),
        (5, "got int"),
        (None, "got NoneType"),
        (b"cat", "got bytes"),
        ({1, 2}, "got set"),
        ({}, "neither"),
        ({"prompt": None}, "neither"),
        ({"prompt": 5}, "got int"),
        ({"prompt": ["cat"]}, "got list"),
        ({"prompt_token_ids": "cat"}, "got str"),
    ],
)
def test_prompts_of_wrong_types_are_refused(prompt: Any, match: str):
    refused(match, "prompt", prompt)


def test_unknown_keys_of_a_prompt_are_refused_by_name():
    error = refused("multi_modal_data", "prompt", {"prompt": "cat", "multi_modal_data": {}})
    assert isinstance(error, UnsupportedError)


@pytest.mark.parametrize("token_id", [-1, VOCABULARY, 2**70])
def test_ids_out_of_vocabulary_are_refused(token_id: int):
    refused(f"token id {token_id} is out of vocabulary", "prompt", [1, token_id])


def test_a_tokenizer_larger_than_the_model_is_noticed():
    refused("out of vocabulary", "prompt", "cat", processor=make(vocab_size=100))


def test_half_a_surrogate_pair_is_refused():
    refused("surrogate", "prompt", "a\ud800")


def test_special_tokens_in_text_are_recognized():
    assert make().process("r", "<bos>", add_special_tokens=False).prompt_token_ids == [BOS]


# --- length ------------------------------------------------------------------------------------------------


def test_one_token_of_room_is_enough():
    assert len(make().process("r", [1] * (MAX_LEN - 1)).prompt_token_ids) == MAX_LEN - 1


@pytest.mark.parametrize("length", [MAX_LEN, MAX_LEN + 1, 1000])
def test_a_prompt_that_leaves_no_room_is_refused(length: int):
    error = refused(f"maximum context length is {MAX_LEN} tokens.*{length} tokens", "prompt", [1] * length)
    assert error.code == "context_length_exceeded"


def test_an_absurdly_long_text_is_refused_without_tokenizing():
    start = time.process_time()
    error = refused("characters", "prompt", "x" * 50_000_000)
    assert time.process_time() - start < 1.0
    assert error.code == "context_length_exceeded"


def test_an_absurdly_long_text_is_cut_before_tokenizing_when_it_may_be_truncated():
    start = time.process_time()
    params = SamplingParams(truncate_prompt_tokens=3)
    request = make().process("r", "x" * 50_000_000 + " a cat", params)
    assert time.process_time() - start < 2.0
    assert request.prompt_token_ids == TOKENIZER.encode("x a cat")[-3:]


def test_max_tokens_beyond_the_context_is_refused_and_within_is_clamped_later():
    error = refused("max_tokens is 51", "max_tokens", params=SamplingParams(max_tokens=MAX_LEN + 1))
    assert error.code == "context_length_exceeded"
    make().process("r", [1] * 40, SamplingParams(max_tokens=MAX_LEN))


@pytest.mark.parametrize(
    ("keep", "max_tokens", "expected"),
    [(3, 16, 3), (99 - MAX_LEN, 16, 49), (-1, 16, MAX_LEN - 16), (-1, None, 49)],
)
def test_truncation_keeps_the_end(keep: int, max_tokens: int | None, expected: int):
    params = SamplingParams(truncate_prompt_tokens=keep, max_tokens=max_tokens)
    token_ids = list(range(200))
    assert make().process("r", token_ids, params).prompt_token_ids == token_ids[-expected:]


def test_truncation_longer_than_the_prompt_changes_nothing():
    assert make().process("r", [1, 2], SamplingParams(truncate_prompt_tokens=9)).prompt_token_ids == [1, 2]


def test_truncation_beyond_the_context_is_refused():
    refused("51", "truncate_prompt_tokens", params=SamplingParams(truncate_prompt_tokens=MAX_LEN + 1))


# --- sampling parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_have_a_limit(name: str):
    make().process("r", "cat", SamplingParams(**{name: 20}))
    refused("21.*at most 20", name, params=SamplingParams(**{name: 21}))
    refused("-1", name, params=SamplingParams(**{name: -1}))
    unlimited = make(max_logprobs=-1).process("r", "cat", SamplingParams(**{name: -1}))
    assert getattr(unlimited.core_requests[0].sampling_params, name) == -1


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [VOCABULARY]},
        {"allowed_token_ids": [1, VOCABULARY]},
        {"logit_bias": {VOCABULARY: 1.0}},
    ],
)
def test_parameters_out_of_vocabulary_are_refused(params: dict[str, Any]):
    refused("out of vocabulary", next(iter(params)), params=SamplingParams(**params))


def test_parameters_changed_after_construction_are_validated_again():
    params = SamplingParams()
    params.top_p = 7.0
    refused("top_p", "top_p", params=params)


@pytest.mark.parametrize("params", [{"temperature": 1}, 5, "greedy"])
def test_other_kinds_of_parameters_are_refused(params: Any):
    refused("sampling_params must be SamplingParams", "sampling_params", params=params)


def test_defaults_stand_in_for_missing_parameters_only():
    processor = make(default_sampling_params={"temperature": 0.25, "top_k": 9})
    assert processor.process("r", "cat").sampling_params.top_k == 9
    assert processor.process("r", "cat", SamplingParams()).sampling_params.top_k == 0


def test_bad_words_are_tokenized_at_the_start_and_after_a_space():
    request = make().process("r", "cat", SamplingParams(bad_words=["cat", " hat", "cat"]))
    encode = TOKENIZER.backend.encode
    expected = [encode(text, add_special_tokens=False).ids for text in ("cat", " cat", "hat", " hat")]
    assert request.core_requests[0].bad_words_token_ids == expected


def test_a_bad_word_of_spaces_is_itself():
    request = make().process("r", "cat", SamplingParams(bad_words=["  "]))
    assert request.core_requests[0].bad_words_token_ids == [TOKENIZER.encode("  ", add_special_tokens=False)]


def test_too_many_bad_words_are_refused():
    make().process("r", "cat", SamplingParams(bad_words=[f"w{i}" for i in range(64)]))
    refused("130 tokenized forms", "bad_words", params=SamplingParams(bad_words=[f"w{i}" for i in range(65)]))


@pytest.mark.parametrize("priority", [True, 1.5, "1", 2**63, None])
def test_priorities_are_integers(priority: Any):
    refused("priority", "priority", priority=priority)


@pytest.mark.parametrize("salt", ["", "x" * 129, 5, True])
def test_cache_salts_are_short_strings(salt: Any):
    refused("cache_salt", "cache_salt", cache_salt=salt)


def test_a_cache_salt_may_come_with_the_prompt():
    prompt = {"prompt": "cat", "cache_salt": "s"}
    assert make().process("r", prompt).core_requests[0].cache_salt == "s"
    assert make().process("r", prompt, cache_salt="t").core_requests[0].cache_salt == "t"


@pytest.mark.parametrize("request_id", ["", None, 5])
def test_request_ids_are_strings(request_id: Any):
    with pytest.raises(InvalidRequestError) as error:
        make().process(request_id, "cat")
    assert error.value.param == "request_id"


# --- n and seeds -------------------------------------------------------------------------------------------


def test_n_completions_are_n_core_requests_with_seeds_of_their_own():
    request = make().process("r", "cat", SamplingParams(n=3, temperature=1.0, seed=2**63 - 2))
    assert [core.request_id for core in request.core_requests] == ["0_r", "1_r", "2_r"]
    assert [core.seed for core in request.core_requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert all(core.sampling_params.n == 1 for core in request.core_requests)
    assert request.sampling_params.n == 3


def test_a_single_completion_keeps_the_request_s_id_and_seed():
    (core,) = make().process("r", "cat", SamplingParams(seed=-5)).core_requests
    assert (core.request_id, core.seed) == ("r", -5)


def drawn(seed: int, count: int = 5) -> list[int]:
    processor = make(seed=seed)
    return [processor.process(f"r{i}", "cat").core_requests[0].seed for i in range(count)]


def test_drawn_seeds_repeat_with_the_engine_s_seed():
    assert drawn(0) == drawn(0)
    assert len(set(drawn(0) + drawn(1) + drawn(-1))) == 15
    assert all(0 <= seed < 2**63 for seed in drawn(0))


def test_seeds_are_drawn_in_order_of_arrival_whatever_takes_longer():
    async def main() -> list[int]:
        processor = make(seed=0, max_model_len=10**6)
        prompts = ["x" * (LONG_TEXT * 20), "cat", "x" * LONG_TEXT, "cat", "cat"]
        calls = [processor.process_async(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        requests = await asyncio.gather(*calls)
        processor.close()
        return [request.core_requests[0].seed for request in requests]

    assert asyncio.run(main()) == drawn(0)


# --- without a tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("cat", {}, "prompt"),
        ({"prompt": "cat"}, {}, "prompt"),
        ([1], {"stop": ["x"]}, "stop"),
        ([1], {"bad_words": ["x"]}, "bad_words"),
    ],
)
def test_without_a_tokenizer_text_is_refused_by_name(prompt: Any, params: dict[str, Any], param: str):
    error = refused("tokenizer", param, prompt, SamplingParams(**params), processor=make(tokenizer=None))
    assert isinstance(error, UnsupportedError)


def test_without_a_tokenizer_token_ids_are_served():
    request = make(tokenizer=None).process("r", [1, 2])
    assert request.core_requests[0].sampling_params.detokenize is False


# --- the event loop ----------------------------------------------------------------------------------------


def test_a_long_text_does_not_hold_up_the_event_loop():
    async def main() -> float:
        processor = make(max_model_len=10**8)
        longest, last = 0.0, time.perf_counter()
        long = asyncio.create_task(processor.process_async("r", "the cat sat on a hat. " * 20_000))
        while not long.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        request = await long
        assert len(request.prompt_token_ids) > 40_000
        start = time.perf_counter()
        processor.encode("the cat sat on a hat. " * 20_000)
        processor.close()
        return longest / (time.perf_counter() - start)

    # Other processes hold the loop up, too, but not each time.
    assert any(asyncio.run(main()) < 0.5 for _ in range(5)), (
        "no pause of the loop is nearly as long as the tokenization"
    )


def test_errors_of_a_thread_reach_the_caller():
    async def main() -> None:
        processor = make(max_model_len=10**6)
        with pytest.raises(InvalidRequestError, match="surrogate"):
            await processor.process_async("r", "x" * LONG_TEXT + "\ud800")
        with pytest.raises(InvalidRequestError, match="maximum context length"):
            await make().process_async("r", "abcdefgh" * LONG_TEXT)
        processor.close()

    asyncio.run(main())

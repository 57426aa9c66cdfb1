from __future__ import annotations

import pytest
from fake_engine import BOS, FakeEngine
from http_support import chunks, client_of, error

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

pytestmark = pytest.mark.anyio


async def test_text_finish_and_usage(complete):
    body = (await complete(max_tokens=3)).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "fake-model"
    assert body["choices"] == [
        {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "total_tokens": 9,
    }


async def test_sixteen_tokens_by_default(complete):
    assert (await complete()).json()["choices"][0]["text"] == "abcdefghijklmnop"


async def test_alias_is_reported_as_asked(complete):
    assert (await complete(model="alias")).json()["model"] == "alias"


async def test_stop_string_is_named(complete):
    choice = (await complete(stop=["x", "de"])).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "de")


async def test_stop_token_is_named(complete):
    choice = (await complete(stop_token_ids=[ord("c")])).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("c"))


async def test_token_ids_as_prompt(complete, engine: FakeEngine):
    await complete(prompt=[1, 2, 3], max_tokens=1)
    assert engine.admitted[0].prompt_token_ids == [1, 2, 3]


async def test_special_tokens_are_added_unless_refused(complete, engine: FakeEngine):
    await complete(prompt="a", max_tokens=1)
    await complete(prompt="a", max_tokens=1, add_special_tokens=False)
    assert [request.prompt_token_ids for request in engine.admitted] == [[BOS, 97], [97]]


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[1], [2], [3]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_numbered_prompt_by_prompt(complete, prompts, stream):
    response = await complete(prompt=prompts, n=2, max_tokens=2, stream=stream, temperature=1)
    texts = dict.fromkeys(range(6), "")
    for chunk in chunks(response) if stream else [response.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab", 1: "bc", 2: "ab", 3: "bc", 4: "ab", 5: "bc"}


async def test_stream_gives_the_same_text(complete):
    events = chunks(await complete(stream=True, max_tokens=4))
    assert "".join(event["choices"][0]["text"] for event in events) == "abcd"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


async def test_stream_usage_comes_last(complete):
    events = chunks(await complete(stream=True, max_tokens=4, stream_options={"include_usage": True}))
    assert [event["usage"] for event in events[:-1]] == [None] * 4
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert events[-1]["usage"]["prompt_tokens"] == 6


async def test_stream_usage_with_every_chunk(complete):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(await complete(stream=True, max_tokens=3, stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


async def test_usage_sums_prompts(complete):
    events = chunks(
        await complete(
            prompt=["a", "bcd"], n=2, temperature=1, stream=True, max_tokens=3,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert events[-1]["usage"]["prompt_tokens"] == 2 + 4
    assert events[-1]["usage"]["completion_tokens"] == 12


async def test_logprobs(complete, engine: FakeEngine):
    engine.sampled_rank = 3
    logprobs = (await complete(max_tokens=2, logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "text_offset": [0, 1],
        "token_logprobs": [-1.5, -1.5],
        "tokens": ["a", "b"],
        "top_logprobs": [{"A": -0.5, "a": -1.5}, {"A": -0.5, "b": -1.5}],
    }


async def test_streamed_logprobs_go_on_counting(complete):
    events = chunks(await complete(max_tokens=3, logprobs=0, stream=True))
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    assert [entry["text_offset"] for entry in logprobs] == [[0], [1], [2]]
    assert [entry["tokens"] for entry in logprobs] == [["a"], ["b"], ["c"]]


async def test_tokens_spelt_as_ids(complete):
    logprobs = (await complete(max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)).json()["choices"][
        0
    ]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97"]
    assert list(logprobs["top_logprobs"][0]) == ["token_id:97"]


async def test_echo(complete):
    assert (await complete(echo=True, max_tokens=2)).json()["choices"][0]["text"] == "helloab"


async def test_echo_of_token_ids(complete):
    body = (await complete(prompt=[BOS, 104, 105], echo=True, max_tokens=1)).json()
    assert body["choices"][0]["text"] == "<s>hia"


async def test_streamed_echo_comes_once_for_each_choice(complete):
    events = chunks(await complete(echo=True, n=2, temperature=1, max_tokens=2, stream=True))
    texts = ["", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["helloab", "hellobc"]


async def test_echo_with_logprobs_scores_the_prompt(complete):
    logprobs = (await complete(prompt="hi", echo=True, logprobs=1, max_tokens=1)).json()["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"] == ["<s>", "h", "i", "a"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_only(complete, stream):
    """max_tokens=0 with echo: the prompt's log probabilities and nothing else."""
    response = await complete(
        prompt="hi", echo=True, logprobs=0, max_tokens=0, stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip
    bodies = chunks(response) if stream else [response.json()]
    choice = bodies[0]["choices"][0]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]
    assert choice["finish_reason"] == "length"
    assert bodies[-1]["usage"]["completion_tokens"] == 0


async def test_no_tokens_without_echo_are_refused(complete):
    error(await complete(max_tokens=0), 400, "max_tokens")


async def test_prompt_logprobs_per_choice(complete):
    choice = (await complete(prompt="hi", prompt_logprobs=1, max_tokens=1)).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {"104": {"logprob": -0.5, "rank": 1, "decoded_token": "h"}},
        {"105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"}},
    ]


async def test_token_ids_on_request(complete):
    choice = (await complete(prompt="hi", max_tokens=2, return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == [97, 98]
    assert choice["prompt_token_ids"] == [BOS, 104, 105]
    events = chunks(await complete(prompt="hi", max_tokens=2, return_token_ids=True, stream=True))
    assert [event["choices"][0]["token_ids"] for event in events] == [[97], [98]]
    assert [event["choices"][0].get("prompt_token_ids") for event in events] == [[BOS, 104, 105], None]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_cached_tokens_are_reported_when_the_server_is_told_to(path: str, stream: bool):
    body = (
        {"prompt": "x" * 40}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "x" * 24}]}
    )
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for enabled in (False, True):
        config = ServerConfig(enable_prompt_tokens_details=enabled)
        async with client_of(create_app(FakeEngine(), config, ["m"])) as client:
            response = await client.post(path, json={**body, **options, "max_tokens": 1})
        usage = chunks(response)[-1]["usage"] if stream else response.json()["usage"]
        assert usage.get("prompt_tokens_details") == ({"cached_tokens": 32} if enabled else None)


async def test_longer_than_the_context_is_cut(complete, engine: FakeEngine):
    """prompt + max_tokens may exceed the context: the output ends where it ends."""
    body = (await complete(prompt="x" * 1000, max_tokens=1024)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == engine.info.max_model_len


async def test_request_id(client):
    response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "trace-7"})
    assert response.headers["x-request-id"] == "trace-7"
    assert response.json()["id"] == "cmpl-trace-7"
    response = await client.post("/v1/completions", json={"prompt": "a", "request_id": "mine"})
    assert response.json()["id"] == "cmpl-mine"
    assert response.headers["x-request-id"]

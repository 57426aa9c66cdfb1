from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from http_support import chunks, client_of

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

pytestmark = pytest.mark.anyio


async def test_message_finish_and_usage(chat, engine: FakeEngine):
    body = (await chat(max_tokens=3)).json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens"] == len(engine.admitted[0].prompt_token_ids)


async def test_template_is_rendered(chat, engine: FakeEngine):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
    ]
    await chat(messages=messages, max_tokens=1)
    assert engine.admitted[0].prompt == "<system>s\n<user>u\n<assistant>"
    assert engine.admitted[0].prompt_token_ids == list(
        engine.admitted[0].prompt.encode()
    )  # no BOS of our own


async def test_special_tokens_on_request(chat, engine: FakeEngine):
    await chat(add_special_tokens=True, max_tokens=1)
    assert engine.admitted[0].prompt_token_ids[0] == 256


async def test_generation_prompt_can_be_left_out(chat, engine: FakeEngine):
    await chat(add_generation_prompt=False, max_tokens=1)
    assert engine.admitted[0].prompt == "<user>hello\n"


async def test_final_message_can_be_continued(chat, engine: FakeEngine):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Sure"}]
    body = (await chat(messages=messages, continue_final_message=True, echo=True, max_tokens=2)).json()
    assert engine.admitted[0].prompt is not None
    assert engine.admitted[0].prompt.endswith("<assistant>Sure")
    assert body["choices"][0]["message"]["content"] == "Sureab"


async def test_template_arguments_and_documents(engine: FakeEngine):
    template = "{{ mood }}{% for d in documents %}[{{ d.title }}]{% endfor %}{{ messages[0].content }}"
    app = create_app(engine, ServerConfig(), ["m"], chat_template=template)
    async with client_of(app) as client:
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"mood": "glad"},
            "documents": [{"title": "one"}],
        }
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert engine.admitted[0].prompt == "glad[one]x"


async def test_the_rest_of_the_context_by_default(chat, engine: FakeEngine):
    body = (await chat()).json()
    assert body["usage"]["total_tokens"] == engine.info.max_model_len
    assert engine.admitted[0].params.max_tokens is None


async def test_max_completion_tokens_wins(chat):
    assert (await chat(max_tokens=9, max_completion_tokens=2)).json()["usage"]["completion_tokens"] == 2


async def test_stream(chat):
    events = chunks(await chat(max_tokens=3, stream=True))
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {"content": "c"},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, None, "length"]
    assert events[-1]["choices"][0]["stop_reason"] is None
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_stream_of_several_choices(chat):
    events = chunks(await chat(max_tokens=2, n=3, temperature=1, stream=True))
    choices = [choice for event in events for choice in event["choices"]]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None, None, "length"]
        assert "".join(choice["delta"]["content"] for choice in own) == "abcd"[index : index + 2]


async def test_stream_usage(chat):
    events = chunks(
        await chat(max_tokens=3, n=2, temperature=1, stream=True, stream_options={"include_usage": True})
    )
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 6
    assert all(event["usage"] is None for event in events[:-1])


async def test_continuous_usage(chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chunks(await chat(max_tokens=2, stream=True, stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(chat, engine: FakeEngine, stream):
    engine.sampled_rank = 3
    response = await chat(max_tokens=2, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        entries = [
            entry
            for event in chunks(response)
            if event["choices"][0]["logprobs"]
            for entry in event["choices"][0]["logprobs"]["content"]
        ]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert entries[0] == {
        "token": "a",
        "logprob": -1.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "A", "logprob": -0.5, "bytes": [65]},
            {"token": "B", "logprob": -1.0, "bytes": [66]},
        ],
    }


async def test_logprobs_without_alternatives(chat):
    choice = (await chat(max_tokens=1, logprobs=True)).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_extras_at_top_level(chat):
    body = (await chat(max_tokens=1, prompt_logprobs=0, return_token_ids=True)).json()
    assert body["prompt_logprobs"][0] is None
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert body["choices"][0]["token_ids"] == [97]
    events = chunks(await chat(max_tokens=2, return_token_ids=True, stream=True))
    assert events[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in events[1:])
    assert [event["choices"][0].get("token_ids") for event in events] == [None, [97], [98]]


async def test_a_stopped_answer(chat):
    choice = (await chat(stop="cd")).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "cd")


async def test_an_answer_can_be_sent_back(chat, engine: FakeEngine):
    """What a client got is accepted as history, nulls and all."""
    message = (await chat(max_tokens=2)).json()["choices"][0]["message"]
    message |= {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}
    history = [{"role": "user", "content": "a"}, message, {"role": "user", "content": "b"}]
    assert (await chat(messages=history, max_tokens=1)).status_code == 200
    assert engine.admitted[-1].prompt == "<user>a\n<assistant>ab\n<user>b\n<assistant>"

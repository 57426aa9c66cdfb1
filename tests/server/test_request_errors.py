"""Every mistake of a request: its status, type and the parameter that is named."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from fake_engine import FakeEngine
from http_support import chunks, client_of, error

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.openai.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.server.openai.unsupported import UNSUPPORTED

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]
BODIES = {"/v1/completions": {"prompt": "hello"}, "/v1/chat/completions": {"messages": HELLO}}


@pytest.fixture(params=list(BODIES))
def endpoint(request) -> str:
    return request.param


async def post(client: httpx.AsyncClient, endpoint: str, **body: object) -> httpx.Response:
    return await client.post(endpoint, json={**BODIES[endpoint], **body})


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_tokens", "five"),
        ("max_tokens", 5.5),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("temperature", [1]),
        ("top_p", {}),
        ("n", "2"),
        ("n", 2.0),
        ("seed", 2**63),
        ("seed", 10**400),
        ("top_k", 2**70),
        ("stream", "yes"),
        ("ignore_eos", 1),
        ("stop", 5),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [2**64]),
        ("logit_bias", []),
        ("logit_bias", {"5": "x"}),
        ("bad_words", "word"),
        ("priority", 2**63),
        ("request_id", "two words"),
        ("request_id", "x" * 300),
        ("request_id", ""),
        ("model", 5),
        ("user", 5),
        ("metadata", "x"),
        ("stream_options", True),
    ],
)
async def test_wrong_types(client, endpoint, field, value):
    found = error(await post(client, endpoint, **{field: value}), 400)
    assert found["type"] == "Bad Request"
    assert found["param"].startswith(f"body.{field}")
    assert f"body.{field}" in found["message"]
    assert len(found["message"]) < 600


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 10**6),
        ("max_tokens", -1),
        ("max_tokens", 1025),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("bad_words", [""]),
        ("prompt_logprobs", -2),
        ("truncate_prompt_tokens", 0),
    ],
)
async def test_values_out_of_range(client, endpoint, field, value):
    found = error(await post(client, endpoint, **{field: value}), 400, field)
    assert found["type"] == "BadRequestError"
    assert field in found["message"]


async def test_max_completion_tokens_is_named_as_it_was_spelt(client):
    error(
        await post(client, "/v1/chat/completions", max_completion_tokens=1025), 400, "max_completion_tokens"
    )


@pytest.mark.parametrize("field", ["no_such_field", "best_off", "__class__", "x" * 5000])
async def test_unknown_fields(client, endpoint, field):
    found = error(await post(client, endpoint, **{field: 1}), 400)
    assert found["param"] == field[:100]
    assert len(found["message"]) < 300


async def test_a_misspelt_field_is_corrected(client, endpoint):
    found = error(await post(client, endpoint, temprature=1), 400, "temprature")
    assert "'temperature'" in found["message"]


ASKS = {
    "best_of": 3,
    "function_call": "auto",
    "length_penalty": 2.0,
    "modalities": ["audio"],
    "response_format": {"type": "json_object"},
    "return_prompt_text": True,
    "return_weight_versions": True,
    "stream_interval": 5,
    "suffix": "end",
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "truncation_side": "right",
    "use_beam_search": True,
}


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
async def test_what_is_not_offered_is_refused_by_name(client, endpoint, field):
    if field in (CompletionRequest if endpoint == "/v1/completions" else ChatCompletionRequest).model_fields:
        pytest.skip("this endpoint offers it")
    found = error(await post(client, endpoint, **{field: ASKS.get(field, {"a": 1})}), 400, field)
    assert field in found["message"]
    assert (await post(client, endpoint, max_tokens=1, **{field: None})).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"best_of": 1},
        {"best_of": 2, "n": 2},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"use_beam_search": False},
        {"length_penalty": 1.0},
        {"suffix": ""},
    ],
)
async def test_fields_that_ask_for_nothing_are_fine(client, endpoint, body):
    assert (await post(client, endpoint, max_tokens=1, **body)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    ],
)
async def test_bookkeeping_fields_are_accepted(client, endpoint, body):
    assert (await post(client, endpoint, max_tokens=1, **body)).status_code == 200


@pytest.mark.parametrize(
    "body, param",
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"model": "gpt-4"}, "model"),
    ],
)
async def test_contradictions(client, endpoint, body, param):
    error(await post(client, endpoint, **body), 404 if param == "model" else 400, param)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"logprobs": 3}, "body.logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "nam": "y"}]}, "messages[0].nam"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].function",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"chat_template_kwargs": "x"}, "body.chat_template_kwargs"),
        ({"documents": [1]}, "body.documents.0"),
    ],
)
async def test_chat_mistakes(client, body, param):
    error(await post(client, "/v1/chat/completions", **body), 400, param)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[1], []],
        ["a", [1]],
        [1, "a"],
        [[1], 2],
        [1.5],
        [True],
        [-1],
        [[-1]],
        [2**64],
        [None],
        None,
        5,
        {"text": "a"},
        ["a"] * 1025,
        [[1]] * 1025,
    ],
)
async def test_prompt_mistakes(client, prompt):
    error(await post(client, "/v1/completions", prompt=prompt), 400, "prompt")


async def test_too_many_choices(client, engine: FakeEngine):
    found = error(await post(client, "/v1/completions", prompt=["a"] * 1000, n=17, temperature=1), 400, "n")
    assert "17000 choices" in found["message"]
    assert engine.admitted == []


async def test_missing_prompt_and_messages(client):
    error(await client.post("/v1/completions", json={}), 400, "body.prompt")
    error(await client.post("/v1/chat/completions", json={"prompt": "x"}), 400, "prompt")


async def test_out_of_vocabulary(client, engine: FakeEngine):
    found = error(await post(client, "/v1/completions", prompt=[[1], [258]]), 400, "prompt")
    assert "out of vocabulary" in found["message"]
    assert engine.num_running == 0, "the first prompt must not stay admitted"


async def test_too_long_prompt(client):
    found = error(await post(client, "/v1/completions", prompt="x" * 2000), 400, "input_tokens")
    assert "maximum context length is 1024 tokens" in found["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "x"}',
        b'{"temperature": 1e999, "prompt": "x"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x"} trailing',
        b"[" * 100_000,
        b'{"metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}",
        b"[1, 2]",
        b'"text"',
        b"null",
        b"5",
    ],
)
async def test_broken_bodies(client, endpoint, content):
    response = await client.post(endpoint, content=content, headers={"content-type": "application/json"})
    error(response, 400)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
async def test_wrong_content_type(client, endpoint, content_type):
    headers = {"content-type": content_type} if content_type else {}
    response = await client.post(endpoint, content=json.dumps(BODIES[endpoint]).encode(), headers=headers)
    assert "Only 'application/json' is allowed" in error(response, 400)["message"]


async def test_content_type_may_name_a_charset(client, endpoint):
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await client.post(endpoint, content=json.dumps(BODIES[endpoint]).encode(), headers=headers)
    assert response.status_code == 200


async def test_body_limit(engine: FakeEngine, endpoint):
    app = create_app(engine, ServerConfig(max_body_bytes=1000), ["m"])

    async def unsized():
        for _ in range(30):
            yield b" " * 100

    async with client_of(app) as client:
        error(await client.post(endpoint, json={"prompt": "x" * 1000}), 413)
        headers = {"content-type": "application/json"}
        error(await client.post(endpoint, content=unsized(), headers=headers), 413)


async def test_unknown_routes_and_methods(client):
    assert error(await client.get("/v1/nothing"), 404)["type"] == "Not Found"
    response = await client.get("/v1/completions")
    assert error(response, 405)["type"] == "Method Not Allowed"
    assert "POST" in response.headers["allow"]


async def test_unknown_model(client, endpoint):
    found = error(await post(client, endpoint, model="gpt-4"), 404, "model")
    assert found["type"] == "NotFoundError"
    assert found["message"] == "The model `gpt-4` does not exist. Valid aliases: fake-model, alias."


async def test_invalid_request_id_header(client):
    response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "a b"})
    error(response, 400, "X-Request-Id")


async def test_many_mistakes_are_cut_short(client):
    found = error(
        await post(client, "/v1/completions", logit_bias={str(i): "x" * 1000 for i in range(50)}), 400
    )
    assert "50 validation errors" in found["message"]
    assert "and 40 more" in found["message"]
    assert len(found["message"]) < 4100


async def test_a_full_queue(endpoint):
    app = create_app(FakeEngine(max_running=0), ServerConfig(), ["m"])
    async with client_of(app) as client:
        assert error(await post(client, endpoint), 503)["type"] == "Service Unavailable"
        metrics = (await client.get("/metrics")).text
    assert 'jaxserve:admission_rejections_total{engine="0",model_name="m",reason="queue_full"} 1.0' in metrics


async def test_a_dead_engine(endpoint):
    engine = FakeEngine()
    app = create_app(engine, ServerConfig(), ["m"])
    engine.die("out of memory")
    async with client_of(app) as client:
        assert "out of memory" in error(await post(client, endpoint), 503)["message"]


async def test_an_engine_that_dies_meanwhile(endpoint):
    engine = FakeEngine(step_seconds=0.01)
    app = create_app(engine, ServerConfig(), ["m"])
    async with client_of(app) as client:
        whole = asyncio.ensure_future(post(client, endpoint, max_tokens=1000))
        streamed = asyncio.ensure_future(post(client, endpoint, max_tokens=1000, stream=True))
        while engine.num_running < 2:
            await asyncio.sleep(0.01)
        engine.die()
        error(await whole, 503)
        assert chunks(await streamed)[-1]["error"]["code"] == 503


async def test_a_failed_step(client):
    found = error(await post(client, "/v1/completions", prompt="fail"), 500)
    assert found["type"] == "InternalServerError"
    assert "/srv" not in found["message"]


async def test_a_failed_step_in_a_stream(client):
    events = chunks(await post(client, "/v1/completions", prompt="fail", stream=True))
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["a", "b", "c"]
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert events[-1]["error"]["code"] == 500


async def test_one_failed_prompt_fails_them_all(client, engine: FakeEngine):
    error(await post(client, "/v1/completions", prompt=["fail", "fine"], max_tokens=500), 500)
    assert engine.num_running == 0
    assert len(engine.aborted) == 1


async def test_the_unforeseen_is_not_shown(app, client, engine: FakeEngine, endpoint, monkeypatch):
    def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("secret detail in /etc/passwd")

    monkeypatch.setattr(engine, "default_sampling_params", broken)
    found = error(await post(client, endpoint), 500)
    assert "secret" not in found["message"]


async def test_without_a_tokenizer():
    app = create_app(FakeEngine(tokenizer=False), ServerConfig(), ["m"])
    async with client_of(app) as client:
        error(await post(client, "/v1/chat/completions"), 400)
        error(await client.post("/tokenize", json={"prompt": "x"}), 400)
        error(await client.post("/detokenize", json={"tokens": [1]}), 400)
        response = await post(client, "/v1/completions", prompt=[1, 2], max_tokens=1)
        assert response.status_code == 200
        error(await post(client, "/v1/completions", prompt=[1, 2], max_tokens=1, echo=True), 400)


async def test_nothing_is_left_running(client, engine: FakeEngine, endpoint):
    for body in ({"n": 0}, {"tools": [{}]}, {"model": "x"}, {"stop": [""]}):
        await post(client, endpoint, **body)
    assert engine.num_running == 0
    assert engine.admitted == []

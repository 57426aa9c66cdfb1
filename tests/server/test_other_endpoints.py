"""/inference/v1/generate, /v1/chat/completions/batch, /invocations, /load and what development mode adds."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from http_support import chunks, client_of, error

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]


# --- /inference/v1/generate ------------------------------------------------------------------------------


async def generate(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/inference/v1/generate", json={"token_ids": [104, 105], **body})


async def test_token_ids_in_and_out(client, engine: FakeEngine):
    response = await generate(
        client, request_id="mine", sampling_params={"max_tokens": 3, "n": 2, "logprobs": 1, "seed": 4}
    )
    body = response.json()
    assert body["request_id"].endswith("mine")
    assert [choice["token_ids"] for choice in body["choices"]] == [[97, 98, 99], [98, 99, 100]]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert body["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97"
    assert body["prompt_logprobs"] is None
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    admitted = engine.admitted[0]
    assert admitted.prompt_token_ids == [104, 105]
    assert (admitted.params.seed, admitted.params.detokenize) == (4, False)


async def test_token_ids_streamed(client):
    response = await generate(
        client, stream=True, stream_options={"include_usage": True}, sampling_params={"max_tokens": 3}
    )
    *events, usage = chunks(response)
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == [97, 98, 99]
    assert usage["usage"]["completion_tokens"] == 3


async def test_stop_strings_need_text(client, engine: FakeEngine):
    await generate(client, sampling_params={"stop": ["c"]})
    assert engine.admitted[0].params.detokenize


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "prompt"),
        ({"token_ids": "hello"}, "body.token_ids"),
        ({"token_ids": [-1]}, "body.token_ids.0"),
        ({"token_ids": [True]}, "body.token_ids.0"),
        ({"token_ids": [10**6]}, "prompt"),
        ({"sampling_params": {"temperature": 3}}, "temperature"),
        ({"sampling_params": {"wrong": 3}}, "body.sampling_params.wrong"),
        ({"sampling_params": {"max_tokens": 10**6}}, "sampling_params.max_tokens"),
        ({"prompt": "x"}, "body.prompt"),
    ],
)
async def test_generate_refuses(client, body: dict[str, Any], param: str):
    error(await generate(client, **body), 400, param)


async def test_generate_for_another_model(client):
    error(await generate(client, model="other"), 404, "model")


# --- /v1/chat/completions/batch --------------------------------------------------------------------------


async def batch(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions/batch", json={"messages": [HELLO, HELLO, HELLO], **body})


async def test_batched_conversations(client, engine: FakeEngine):
    body = (await batch(client, max_tokens=2, n=2)).json()
    assert body["object"] == "chat.completion"
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["message"]["content"] for choice in body["choices"]] == ["ab", "bc"] * 3
    one = len(engine.admitted[0].prompt_token_ids)
    assert body["usage"]["prompt_tokens"] == 3 * one
    assert body["usage"]["completion_tokens"] == 12
    assert not engine.num_running


async def test_every_conversation_has_its_own_prompt(client, engine: FakeEngine):
    other = [{"role": "user", "content": "bye"}]
    await batch(client, messages=[HELLO, other], max_tokens=1)
    assert [bool(admitted.prompt and "bye" in admitted.prompt) for admitted in engine.admitted] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": HELLO}, "messages[0]"),
        ({"messages": [HELLO, []]}, "messages[1]"),
        ({"messages": [HELLO, [{"role": "user"}]]}, "messages[1][0].content"),
        ({"messages": [HELLO] * 1025}, "messages"),
        ({"n": 16000}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_batch_refuses(client, engine: FakeEngine, body: dict[str, Any], param: str):
    error(await batch(client, **body), 400, param)
    assert not engine.num_running


async def test_one_conversation_too_long_admits_none(client, engine: FakeEngine):
    engine.step_seconds = 0.05  # the short one cannot end by itself meanwhile
    long = [{"role": "user", "content": "x" * 2000}]
    error(await batch(client, messages=[HELLO, long]), 400)
    assert not engine.num_running
    assert engine.aborted


# --- /invocations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": HELLO}, "chat.completion"),
        ({"prompt": "hello"}, "text_completion"),
        ({"token_ids": [104], "sampling_params": {}}, None),
    ],
)
async def test_invocations(client, body: dict[str, Any], kind: str | None):
    limit = {} if "sampling_params" in body else {"max_tokens": 2}
    response = await client.post("/invocations", json={**body, **limit})
    assert response.status_code == 200, response.text
    assert response.json().get("object") == kind
    assert response.headers["x-request-id"]


async def test_invocations_stream(client):
    response = await client.post("/invocations", json={"prompt": "x", "stream": True, "max_tokens": 3})
    assert "".join(event["choices"][0]["text"] for event in chunks(response)) == "abc"


@pytest.mark.parametrize("content", [b"{}", b"[]", b"{", b'"prompt"'])
async def test_invocations_refuse(client, content: bytes):
    error(
        await client.post("/invocations", content=content, headers={"content-type": "application/json"}), 400
    )


async def test_a_mistake_in_an_invocation(client):
    error(await client.post("/invocations", json={"prompt": "x", "n": 0}), 400, "n")


async def test_invocations_need_the_key():
    app = create_app(FakeEngine(), ServerConfig(api_key=["k"]), ["m"])
    async with client_of(app) as client:
        error(await client.post("/invocations", json={"prompt": "x"}), 401)


# --- operations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracking", [False, True])
async def test_load(tracking: bool):
    config = ServerConfig(enable_server_load_tracking=tracking)
    engine = FakeEngine()
    app = create_app(engine, config, ["m"])
    async with client_of(app) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        service = app.state.service
        params = service.sampling_params({"max_tokens": 900}, default_max_tokens=None)
        submission = await service.submit("r", ["a", "b"], params)
        assert (await client.get("/load")).json() == {"server_load": 2 * tracking}
        await submission.aclose()
        assert (await client.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize(("method", "path"), [("GET", "/server_info"), ("POST", "/reset_prefix_cache")])
async def test_only_in_development_mode(client, method: str, path: str):
    error(await client.request(method, path), 404)


async def test_development_mode():
    engine = FakeEngine()
    config = ServerConfig(enable_dev_mode=True, api_key=["secret-key"], max_n=7)
    async with client_of(create_app(engine, config, ["m"])) as client:
        error(await client.get("/server_info"), 401)
        client.headers["authorization"] = "Bearer secret-key"
        response = await client.get("/server_info")
        assert response.json()["server"]["max_n"] == 7
        assert response.json()["engine"]["max_model_len"] == 1024
        assert "secret-key" not in response.text
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        assert engine.num_resets == 1

"""Health, version, metrics, models, tokenizing, API keys, CORS, documentation."""

from __future__ import annotations

import re

import httpx
import pytest
from fake_engine import BOS, FakeEngine
from fastapi import FastAPI
from http_support import client_of, error

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.version import __version__

pytestmark = pytest.mark.anyio

KEYS = ["first-key", "second-kéy"]


@pytest.mark.parametrize("method, path", [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")])
async def test_health_follows_the_engine(client, engine: FakeEngine, method, path):
    assert (await client.request(method, path)).status_code == 200
    engine.die("a reason")
    assert "a reason" in error(await client.request(method, path), 503)["message"]


async def test_version(client):
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_models(client):
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["fake-model", "alias"]
    model = body["data"][0]
    assert (model["owned_by"], model["root"], model["max_model_len"]) == ("jaxserve", "/models/fake", 1024)
    assert model["parent"] is None
    assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
    error(await client.get("/v1/models/org/other"), 404, "model")


async def test_model_names_may_hold_slashes():
    app = create_app(FakeEngine(), ServerConfig(), ["org/model"])
    async with client_of(app) as client:
        assert (await client.get("/v1/models/org/model")).json()["id"] == "org/model"


async def test_tokenize_and_back(client):
    body = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert body == {
        "count": 4,
        "max_model_len": 1024,
        "tokens": [BOS, 104, 195, 169],
        "token_strs": ["", "h", "Ã", "©"],
    }
    back = await client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "<s>hé"}


async def test_tokenize_messages(client):
    messages = [{"role": "user", "content": "x"}]
    body = (await client.post("/tokenize", json={"messages": messages})).json()
    assert bytes(body["tokens"]).decode() == "<user>x\n<assistant>"
    body = (
        await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})
    ).json()
    assert bytes(body["tokens"]).decode() == "<user>x\n"
    assert body["token_strs"] is None


async def test_tokenize_without_special_tokens(client):
    body = (await client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False})).json()
    assert body["tokens"] == [97]


async def test_tokenize_mistakes(client):
    error(await client.post("/tokenize", json={}), 400, "prompt")
    error(await client.post("/tokenize", json={"prompt": "a", "messages": []}), 400)
    error(await client.post("/tokenize", json={"prompt": 5}), 400, "body.prompt")
    error(await client.post("/tokenize", json={"prompt": "a", "model": "x"}), 404, "model")
    error(await client.post("/tokenize", json={"prompt": "a", "colour": "x"}), 400, "body.colour")
    error(await client.post("/detokenize", json={"tokens": [258]}), 400, "tokens")
    error(await client.post("/detokenize", json={"tokens": [-1]}), 400, "body.tokens.0")
    error(await client.post("/detokenize", json={"tokens": "a"}), 400, "body.tokens")


async def test_documentation(client):
    assert "swagger" in (await client.get("/docs")).text
    schema = (await client.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"} <= set(schema["paths"])
    fields = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "temperature", "top_k", "stream_options"} <= set(fields)


# --- metrics ------------------------------------------------------------------------------------


async def metric(client: httpx.AsyncClient, name: str, **labels: str) -> float:
    text = (await client.get("/metrics")).text
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line)
        if (
            match
            and match[1] == name
            and all(f'{key}="{value}"' in match[2] for key, value in labels.items())
        ):
            total += float(match[3])
    return total


async def test_metrics_of_requests(client, complete):
    await complete(max_tokens=3)
    await complete(max_tokens=3, stop="a")
    assert await metric(client, "jaxserve:request_success_total", finished_reason="length") == 1
    assert await metric(client, "jaxserve:request_success_total", finished_reason="stop") == 1
    assert await metric(client, "jaxserve:request_generation_tokens_sum", model_name="fake-model") == 4
    assert await metric(client, "jaxserve:num_requests_running") == 0
    assert await metric(client, "jaxserve:compilations_total") == 0
    assert await metric(client, "jaxserve:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


async def test_metrics_of_http(client, complete):
    await complete(max_tokens=1)
    await complete(temperature=9)
    await client.get("/no/such/route")
    await client.request("BREW", "/no/such/route")
    name = "http_requests_total"
    assert await metric(client, name, handler="/v1/completions", method="POST", status="2xx") == 1
    assert await metric(client, name, handler="/v1/completions", method="POST", status="4xx") == 1
    assert await metric(client, name, handler="none", status="4xx") == 2
    assert await metric(client, name, method="BREW") == 0
    assert await metric(client, "http_request_duration_seconds_count", handler="/v1/completions") == 2


async def test_metrics_are_prometheus_text(client):
    assert (await client.get("/metrics")).headers["content-type"].startswith("text/plain")


async def test_two_applications_share_nothing():
    for name in ("one", "two"):
        async with client_of(create_app(FakeEngine(), ServerConfig(), [name])) as client:
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert await metric(client, "jaxserve:request_success_total") == 1


# --- API keys ------------------------------------------------------------------------------------


@pytest.fixture
def guarded() -> FastAPI:
    return create_app(FakeEngine(), ServerConfig(api_key=KEYS, allowed_origins=["https://ui.example"]), ["m"])


PATHS = ["/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/tokenize", "/no/such/path"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Bearer first-key2", "first-key", "Basic first-key"]
)
async def test_every_path_asks_for_a_key(guarded, path, header):
    async with client_of(guarded) as client:
        response = await client.get(path, headers={"authorization": header} if header is not None else {})
    error(response, 401)
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_a_right_key(guarded, key, scheme):
    async with client_of(guarded) as client:
        headers = {"authorization": f"{scheme} {key}".encode()}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_needs_no_key(guarded, path):
    async with client_of(guarded) as client:
        assert (await client.get(path)).status_code == 200


async def test_a_refused_post_generates_nothing():
    engine = FakeEngine()
    async with client_of(create_app(engine, ServerConfig(api_key=KEYS), ["m"])) as client:
        error(await client.post("/v1/completions", json={"prompt": "x"}), 401)
    assert engine.admitted == []


# --- CORS ------------------------------------------------------------------------------------


async def test_cors_only_where_it_is_configured(guarded, client):
    origin = {"origin": "https://ui.example"}
    preflight = {**origin, "access-control-request-method": "POST"}
    async with client_of(guarded) as other:
        assert (await other.options("/v1/completions", headers=preflight)).status_code == 200
        refused = await other.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://ui.example"
        strange = await other.get("/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in strange.headers
    assert "access-control-allow-origin" not in (await client.get("/health", headers=origin)).headers


# --- logs ------------------------------------------------------------------------------------


async def test_logs_hold_no_prompts(client, complete, chat, caplog):
    caplog.set_level("DEBUG")
    secret = "my-secret-prompt"
    await complete(prompt=secret, max_tokens=1)
    await complete(prompt=[secret, 5])
    await complete(prompt="fail " + secret)
    await complete(prompt="fail " + secret, stream=True)
    await chat(messages=[{"role": "user", "content": secret}], max_tokens=1)
    await client.post("/v1/completions", content=f'{{"prompt": "{secret}"'.encode())
    assert secret not in caplog.text


async def test_a_request_is_logged_on_one_line(client, caplog):
    caplog.set_level("INFO", logger="jaxserve")
    await client.get("/v1/models/%0Aforged%20line")
    (record,) = [r for r in caplog.records if r.name == "jaxserve.server.middleware"]
    assert "\n" not in record.getMessage()
    assert record.getMessage().startswith("GET /v1/models/%0Aforged%20line 404 in ")


async def test_health_checks_are_not_logged(client, caplog):
    caplog.set_level("INFO", logger="jaxserve")
    await client.get("/health")
    assert [r for r in caplog.records if r.name.startswith("jaxserve")] == []


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_profiles_are_refused_by_name_where_they_are_off(client, path):
    response = await client.post(path)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "profiler_dir"

"""What the server's flags change: limits, templates of requests, beams, keep-alive comments, logs, TLS, CORS."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from http_support import chunks, client_of, error
from live_server import live_server, until
from server_process import ServerProcess
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.server.app import create_app
from jaxserve.server.run import bind_unix_socket, check_tls_files

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]


def client_with(engine: FakeEngine | None = None, **settings: Any) -> httpx.AsyncClient:
    return client_of(create_app(engine or FakeEngine(), ServerConfig(**settings), ["m"]))


# --- beam search -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_beam_search_over_completions(complete, engine: FakeEngine, stream: bool):
    response = await complete(
        use_beam_search=True, n=3, max_tokens=4, length_penalty=0.5, temperature=0, stream=stream
    )
    choices = [choice for event in chunks(response) for choice in event["choices"]] if stream else None
    choices = choices or response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3
    assert {len(choice["text"]) for choice in choices} == {4}
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 12
    assert engine.num_running == 0
    assert {admitted.params.max_tokens for admitted in engine.admitted} == {1}


async def test_beam_search_over_chat_with_logprobs(chat, engine: FakeEngine):
    body = (await chat(use_beam_search=True, n=2, max_tokens=3, logprobs=True, top_logprobs=2)).json()
    assert len(body["choices"]) == 2
    for choice in body["choices"]:
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == list(choice["message"]["content"])
        assert {len(entry["top_logprobs"]) for entry in content} == {2}


async def test_the_model_s_defaults_do_not_stand_in_the_way_of_beams():
    async with client_with(FakeEngine(defaults={"temperature": 0.6, "top_k": 20})) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "use_beam_search": True, "n": 2})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"seed": 1}, "seed"),
        ({"stop": ["x"]}, "stop"),
        ({"top_p": 0.5}, "top_p"),
        ({"temperature": 0.5}, "temperature"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"n": 11}, "n"),
        ({"n": 0}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"length_penalty": "x"}, "body.length_penalty"),
    ],
)
async def test_what_beam_search_refuses(complete, body: dict[str, Any], param: str):
    error(await complete(use_beam_search=True, **{"n": 2, **body}), 400, param)


async def test_a_length_penalty_without_beams_is_refused(complete):
    error(await complete(length_penalty=2.0), 400, "length_penalty")
    assert (await complete(length_penalty=1.0, use_beam_search=False)).status_code == 200


async def test_a_client_that_leaves_ends_its_beam_search(engine: FakeEngine):
    engine.step_seconds = 0.01
    app = create_app(engine, ServerConfig(), ["m"])
    async with live_server(app) as url, httpx.AsyncClient() as client:
        body = {"prompt": "x", "use_beam_search": True, "n": 4, "max_tokens": 900}
        asked = asyncio.create_task(client.post(url + "/v1/completions", json=body))
        await until(lambda: len(engine.admitted) > 8)  # in the third step or later
        asked.cancel()
        app_service = app.state.service
        await until(lambda: app_service.num_active == 0 and engine.num_running == 0)
        count = len(engine.admitted)
        await asyncio.sleep(0.1)
        assert len(engine.admitted) == count, "no further step begins"


async def test_a_server_that_shuts_down_ends_beam_searches(engine: FakeEngine):
    engine.step_seconds = 0.01
    app = create_app(engine, ServerConfig(), ["m"])
    async with client_of(app) as client:
        body = {"prompt": "x", "use_beam_search": True, "n": 4, "max_tokens": 900}
        asking = asyncio.ensure_future(client.post("/v1/completions", json=body))
        await until(lambda: len(engine.admitted) > 10)
        await app.state.service.abort_all()
        error(await asyncio.wait_for(asking, 10), 500)
    assert engine.num_running == 0


# --- limits ----------------------------------------------------------------------------------------------


async def test_a_full_queue_says_when_to_come_back():
    async with client_with(FakeEngine(max_running=0)) as client:
        response = await client.post("/v1/completions", json={"prompt": "x"})
        error(response, 503)
        assert response.headers["retry-after"] == "1"
        metrics = (await client.get("/metrics")).text
        assert (
            'jaxserve:admission_rejections_total{engine="0",model_name="m",reason="queue_full"} 1.0'
            in metrics
        )


async def test_choices_have_a_limit():
    async with client_with(max_n=4) as client:
        ok = await client.post("/v1/completions", json={"prompt": ["x", "y"], "n": 2, "max_tokens": 1})
        assert ok.status_code == 200
        error(await client.post("/v1/completions", json={"prompt": ["x"] * 3, "n": 2}), 400, "n")


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"prompt": "x", "temperature": 1e999}', "temperature"),
        ('{"prompt": "x", "temperature": -1e999}', "temperature"),
        ('{"prompt": "x", "top_p": NaN}', "top_p"),
        ('{"prompt": "x", "min_p": Infinity}', "min_p"),
        ('{"prompt": "x", "logit_bias": {"5": 1e400}}', "logit_bias.5"),
        ('{"prompt": [[1, 2], [3, 1e400]]}', "prompt[1][1]"),
        ('{"a": 1, "prompt": "x", "seed": 1e400, "n": 1e400}', "seed"),
        ('{"prompt": "x"', None),
        ("1e999", None),
    ],
)
async def test_numbers_out_of_range_are_named(client, text: str, param: str | None):
    response = await client.post(
        "/v1/completions", content=text, headers={"content-type": "application/json"}
    )
    assert error(response, 400)["param"] == param


@pytest.mark.parametrize("digits", [25, 400, 100_000])
async def test_endless_integers(client, digits: int):
    text = '{"prompt": "x", "seed": ' + "9" * digits + "}"
    response = await client.post(
        "/v1/completions", content=text, headers={"content-type": "application/json"}
    )
    assert error(response, 400)["param"] in ("seed", "body.seed")


# --- templates of requests -------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ documents[0].text if documents }}"


async def test_templates_of_requests_need_the_flag(chat):
    error(await chat(chat_template=TEMPLATE), 400, "chat_template")


async def test_templates_of_requests(engine: FakeEngine):
    async with client_with(engine, trust_request_chat_template=True) as client:
        body = {"messages": HELLO, "chat_template": TEMPLATE, "documents": [{"text": "doc"}], "max_tokens": 1}
        response = await client.post("/v1/chat/completions", json={**body, "return_prompt_text": True})
        assert response.json()["prompt_text"] == "[hello]doc"
        assert engine.admitted[0].prompt == "[hello]doc"
        error(
            await client.post("/v1/chat/completions", json={**body, "chat_template": "{% for"}),
            400,
            "chat_template",
        )
        endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        error(
            await client.post("/v1/chat/completions", json={**body, "chat_template": endless}),
            400,
            "chat_template",
        )
        escape = "{{ ''.__class__.__mro__ }}"
        error(await client.post("/v1/chat/completions", json={**body, "chat_template": escape}), 400)


async def test_the_prompts_text_is_only_told_when_asked_for(chat):
    assert "prompt_text" not in (await chat(max_tokens=1)).json()


# --- streams ---------------------------------------------------------------------------------------------


async def test_comments_keep_an_idle_stream_alive():
    engine = FakeEngine(step_seconds=0.25)
    async with client_with(engine, sse_keep_alive_interval=0.05) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True})
    lines = [line for line in response.text.splitlines() if line]
    assert lines.count(": keep-alive") >= 4
    data = [line for line in lines if line.startswith("data: ")]
    assert data[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in data[:-1]) == "ab"


async def test_no_comments_where_events_come_often(complete):
    async with client_with(sse_keep_alive_interval=5) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, "stream": True})
    assert "keep-alive" not in response.text
    assert len(chunks(response)) > 1


async def test_an_error_after_the_stream_began_with_comments():
    engine = FakeEngine(step_seconds=0.05)
    async with client_with(engine, sse_keep_alive_interval=0.02) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "fail", "max_tokens": 9, "stream": True}
        )
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    failure = json.loads(data[-2])["error"]
    assert failure["code"] == 500
    assert "/srv" not in failure["message"]


@pytest.mark.parametrize("prompts", [1, pytest.param(5, marks=pytest.mark.slow)])
async def test_a_slow_reader_gets_what_it_missed_merged(prompts: int):
    """A reader that stops for a while must not make the server store one event a token."""
    engine = FakeEngine(max_model_len=1 << 20)
    app = create_app(engine, ServerConfig(), ["m"])
    async with live_server(app) as url:
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
        body = json.dumps({"prompt": ["x"] * prompts, "max_tokens": 40_000, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"data: ")
        while len(engine.finished) < prompts:
            await asyncio.sleep(0.05)
        received = b""
        while b"[DONE]" not in received[-64:]:
            received += await reader.read(1 << 16)
        writer.close()
    texts: dict[int, int] = {}
    events = 0
    for line in received.decode().split("data: "):
        if line.startswith("{"):
            events += 1
            for choice in json.loads(line.split("\r\n")[0])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], 0) + len(choice["text"])
    assert sum(texts.values()) >= 40_000 * prompts - 64 * prompts
    assert events < 38_000 * prompts


# --- logs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
async def test_prompts_are_logged_when_asked_for(caplog: pytest.LogCaptureFixture, asked: bool):
    caplog.set_level(logging.DEBUG, logger="jaxserve")
    async with client_with(enable_log_requests=asked) as client:
        await client.post("/v1/completions", json={"prompt": "SECRETWORD", "max_tokens": 1})
        await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "SECRETWORD"}]}
        )
        await client.post("/v1/completions", json={"prompt": "SECRETWORD", "temperature": 9})
    assert ("SECRETWORD" in caplog.text) is asked


async def test_request_ids_can_be_left_out():
    async with client_with(enable_request_id_headers=False) as client:
        assert "x-request-id" not in (await client.get("/version")).headers


# --- CORS ------------------------------------------------------------------------------------------------


async def test_cors_is_closed_by_default(client):
    response = await client.get("/version", headers={"origin": "http://a"})
    assert "access-control-allow-origin" not in response.headers


async def test_cors_flags():
    settings = {"allowed_origins": ["http://a"], "allowed_methods": ["GET"], "allowed_headers": ["x-one"]}
    async with client_with(**settings, allow_credentials=True) as client:
        ask = {
            "origin": "http://a",
            "access-control-request-method": "GET",
            "access-control-request-headers": "x-one",
        }
        response = await client.options("/version", headers=ask)
        assert response.headers["access-control-allow-origin"] == "http://a"
        assert response.headers["access-control-allow-credentials"] == "true"
        assert (await client.options("/version", headers={**ask, "origin": "http://b"})).status_code == 400
        denied = await client.options("/version", headers={**ask, "access-control-request-method": "POST"})
        assert denied.status_code == 400


# --- TLS, sockets, root path -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_tls_over_a_real_server(certificate: tuple[str, str], tmp_path: Path):
    cert, key = certificate
    settings = {"ssl_certfile": cert, "ssl_keyfile": key, "root_path": "/llm", "api_key": ["k"]}
    server = ServerProcess(write_tiny_checkpoint(tmp_path / "llama"), server=settings)
    url = server.url.replace("http:", "https:")
    try:
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=cert)) as client:
            server.wait_ready(client=client)
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer k"
            response = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert response.json()["usage"]["completion_tokens"] == 3
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
    finally:
        assert server.stop()[0] == 0


def test_certificates_are_read_at_once(certificate: tuple[str, str], tmp_path: Path):
    cert, key = certificate
    check_tls_files(ServerConfig(ssl_certfile=cert, ssl_keyfile=key))
    check_tls_files(ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert, ssl_cert_reqs=2))
    (tmp_path / "empty").write_text("")
    for wrong in (
        {"ssl_certfile": cert, "ssl_keyfile": cert},
        {"ssl_certfile": "/no/such/file"},
        {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": str(tmp_path / "empty")},
    ):
        with pytest.raises(ConfigError):
            check_tls_files(ServerConfig(**wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ssl_keyfile": "k"},
        {"ssl_certfile": "c", "ssl_cert_reqs": 3},
        {"ssl_certfile": "c", "ssl_cert_reqs": 2},
    ],
)
def test_tls_settings_that_make_no_sense(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        ServerConfig(**wrong)


def test_unix_sockets(tmp_path: Path):
    path = str(tmp_path / "s")
    first = bind_unix_socket(path)
    first.listen()
    with pytest.raises(ConfigError, match="in use"):
        bind_unix_socket(path)
    first.close()
    bind_unix_socket(path).close()  # nobody listens to it any more
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError):
        bind_unix_socket(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError):
        bind_unix_socket(str(tmp_path / ("x" * 200)))


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_open_paths_under_a_root_path(path: str):
    app = create_app(FakeEngine(), ServerConfig(api_key=["k"], root_path="/llm"), ["m"])
    transport = httpx.ASGITransport(app, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/llm" + path)).status_code == 200
        error(await client.get("/llm/v1/models"), 401)
        for trick in (
            "/llm/v1/models/../health",
            "/llm//health",
            "/llm/health/",
            "/llm/llm/health",
            "/llm/HEALTH",
        ):
            assert (await client.get(trick)).status_code in (401, 404), trick

"""Stored responses: retrieved, gone on from, cancelled, deleted, and dropped in time; those in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from http_support import client_of, error
from live_server import until
from scripted_engine import ScriptedEngine
from test_responses_api import CALL, TOOL, events

from jaxserve.config import ServerConfig
from jaxserve.errors import QueueFullError
from jaxserve.server.app import create_app
from jaxserve.server.openai.responses_api.objects import ReasoningConfig, Response, TextConfig
from jaxserve.server.openai.responses_api.store import (
    OVERHEAD_BYTES,
    ResponseNotFoundError,
    ResponseStore,
    StoredResponse,
)

pytestmark = pytest.mark.anyio

SLOW = {"input": "hello", "max_output_tokens": 5000}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=1 << 14, step_seconds=0.001)


@pytest.fixture
def respond(client: httpx.AsyncClient):
    async def post(**body: Any) -> dict[str, Any]:
        body = {"input": "hello", "max_output_tokens": 3, **body}
        response = await client.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    return post


async def get(client: httpx.AsyncClient, response_id: str, **query: Any) -> dict[str, Any]:
    response = await client.get(f"/v1/responses/{response_id}", params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def ended(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while (body := await get(client, response_id))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.002)
    return body


# --- stored -----------------------------------------------------------------------------------------------


async def test_retrieve(client, respond):
    made = await respond()
    assert made["store"]
    assert await get(client, made["id"]) == made
    unstored = await respond(store=False)
    assert not unstored["store"]
    error(await client.get(f"/v1/responses/{unstored['id']}"), 404)
    streamed = events(
        await client.post("/v1/responses", json={**SLOW, "max_output_tokens": 3, "stream": True})
    )
    assert await get(client, streamed[-1]["response"]["id"]) == streamed[-1]["response"]


async def test_delete(client, respond):
    made = await respond()
    gone = await client.delete(f"/v1/responses/{made['id']}")
    assert gone.json() == {"id": made["id"], "object": "response", "deleted": True}
    for response in (
        await client.get(f"/v1/responses/{made['id']}"),
        await client.delete(f"/v1/responses/{made['id']}"),
        await client.post(f"/v1/responses/{made['id']}/cancel"),
        await client.get(f"/v1/responses/{made['id']}/input_items"),
        await client.post("/v1/responses", json={"input": "x", "previous_response_id": made["id"]}),
    ):
        error(response, 404)


async def test_going_on(respond, engine: FakeEngine):
    first = await respond(instructions="Be short.")
    second = await respond(input="more", previous_response_id=first["id"])
    third = await respond(input="and more", previous_response_id=second["id"], instructions="Be long.")
    assert third["previous_response_id"] == second["id"]
    assert [admitted.prompt for admitted in engine.admitted[1:]] == [
        "<user>hello\n<assistant>abc\n<user>more\n<assistant>",
        "<system>Be long.\n<user>hello\n<assistant>abc\n<user>more\n<assistant>abc\n<user>and more\n<assistant>",
    ]
    # One response can have several continuations.
    await respond(input="else", previous_response_id=first["id"])
    assert engine.admitted[-1].prompt == "<user>hello\n<assistant>abc\n<user>else\n<assistant>"


async def test_references_to_stored_items(client, respond, engine: FakeEngine):
    first = await respond(input=[{"role": "user", "content": "hello", "id": "mine"}])
    items = [
        {"type": "item_reference", "id": "mine"},
        {"id": first["output"][0]["id"]},
        {"role": "user", "content": "more"},
    ]
    second = await respond(input=items)
    assert engine.admitted[1].prompt == "<user>hello\n<assistant>abc\n<user>more\n<assistant>"
    twice = {"input": [items[0], items[0]]}
    error(await client.post("/v1/responses", json=twice), 400, "input[1].id")
    listed = (await client.get(f"/v1/responses/{second['id']}/input_items", params={"order": "asc"})).json()
    assert [item["type"] for item in listed["data"]] == ["message"] * 3


async def test_going_on_after_a_call():
    engine = ScriptedEngine({"Rain": "It rains.", "": CALL})
    async with client_of(create_app(engine, ServerConfig(), ["m"])) as client:
        first = (await client.post("/v1/responses", json={"input": "hello", "tools": [TOOL]})).json()
        call_id = first["output"][0]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "Rain"}
        body = {"input": [result], "tools": [TOOL], "previous_response_id": first["id"]}
        second = (await client.post("/v1/responses", json=body)).json()
    assert second["output"][0]["content"][0]["text"] == "It rains."
    assert '"name": "weather"' in engine.admitted[1].prompt


async def test_going_on_after_a_call_that_broke_off():
    engine = ScriptedEngine({"": CALL})
    async with client_of(create_app(engine, ServerConfig(), ["m"])) as client:
        body = {"input": "hello", "tools": [TOOL], "max_output_tokens": 60}
        first = (await client.post("/v1/responses", json=body)).json()
        assert first["output"][0]["status"] == "incomplete"
        body = {"input": "again", "tools": [TOOL], "previous_response_id": first["id"]}
        second = (await client.post("/v1/responses", json=body)).json()
    assert second["status"] == "completed"


async def test_input_items(client, respond):
    made = await respond(input=[{"role": "user", "content": str(i)} for i in range(5)])
    path = f"/v1/responses/{made['id']}/input_items"

    async def page(**query: Any) -> tuple[list[str], dict[str, Any]]:
        body = (await client.get(path, params=query)).json()
        return [item["content"][0]["text"] for item in body["data"]], body

    texts, body = await page()
    assert texts == ["4", "3", "2", "1", "0"]
    assert not body["has_more"]
    assert (body["first_id"], body["last_id"]) == (body["data"][0]["id"], body["data"][-1]["id"])
    texts, body = await page(limit=2, order="asc")
    assert (texts, body["has_more"]) == (["0", "1"], True)
    texts, body = await page(limit=2, order="asc", after=body["last_id"])
    assert (texts, body["has_more"]) == (["2", "3"], True)
    error(await client.get(path, params={"after": "nobody"}), 400, "after")
    error(await client.get(path, params={"limit": 0}), 400)
    error(await client.get(path, params={"order": "up"}), 400)


async def test_a_request_id_names_the_response_once(client, respond):
    made = await respond(request_id="mine")
    assert made["id"] == "resp_mine"
    error(await client.post("/v1/responses", json={"input": "x", "request_id": "mine"}), 400, "request_id")


async def test_of_two_with_one_request_id_one_is_refused(client, engine: FakeEngine):
    body = {"input": "x", "request_id": "mine", "background": True, "max_output_tokens": 20}
    answers = await asyncio.gather(*(client.post("/v1/responses", json=body) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] + [400] * 7
    await ended(client, "resp_mine")
    assert engine.num_running == 0


@pytest.mark.parametrize("config", [{"response_store_bytes": 0}, {"api_server_count": 2}])
async def test_a_server_without_a_store(engine: FakeEngine, config):
    app = create_app(engine, ServerConfig(**config), ["m"])
    async with client_of(app) as client:
        made = await client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1})
        assert made.json()["store"] is False
        for body in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            (name,) = body
            error(await client.post("/v1/responses", json={"input": "x", **body}), 400, name)


# --- in the background ------------------------------------------------------------------------------------


async def test_background(client, respond, engine: FakeEngine):
    made = await respond(background=True, max_output_tokens=30)
    assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
    done = await ended(client, made["id"])
    assert done["status"] == "incomplete"
    assert len(done["output"][0]["content"][0]["text"]) == 30
    assert done["usage"]["output_tokens"] == 30
    more = await respond(previous_response_id=made["id"])
    assert more["previous_response_id"] == made["id"]


async def test_mistakes_are_told_at_once(client, engine: FakeEngine):
    body = {"input": "x", "background": True, "temperature": 9}
    error(await client.post("/v1/responses", json=body), 400, "temperature")
    error(await client.post("/v1/responses", json={"input": "x" * 20_000, "background": True}), 400)


async def test_a_failure_in_the_background(client, respond):
    made = await respond(input="fail", background=True, max_output_tokens=10)
    done = await ended(client, made["id"])
    assert done["status"] == "failed"
    assert "/srv" not in done["error"]["message"]
    refused = await client.post("/v1/responses", json={"input": "x", "previous_response_id": made["id"]})
    error(refused, 400, "previous_response_id")


@pytest.mark.parametrize("stream", [False, True])
async def test_cancel(client, engine: FakeEngine, stream):
    made = await client.post("/v1/responses", json={**SLOW, "background": True, "stream": False})
    path = f"/v1/responses/{made.json()['id']}"
    await until(lambda: engine.num_running == 1)
    error(
        await client.post("/v1/responses", json={"input": "x", "previous_response_id": made.json()["id"]}),
        400,
        "previous_response_id",
    )
    cancelled = await client.post(f"{path}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    assert engine.num_running == 0
    assert (await client.get(path)).json() == cancelled.json()
    assert (await client.post(f"{path}/cancel")).json() == cancelled.json()


async def test_only_the_background_can_be_cancelled(client, respond):
    made = await respond()
    error(await client.post(f"/v1/responses/{made['id']}/cancel"), 400)


async def test_deleting_ends_it(client, respond, engine: FakeEngine):
    made = await respond(**SLOW, background=True)
    await client.delete(f"/v1/responses/{made['id']}")
    assert engine.num_running == 0
    error(await client.get(f"/v1/responses/{made['id']}"), 404)


async def test_a_background_stream_can_be_read_again(client):
    body = {"input": "hello", "max_output_tokens": 5, "background": True, "stream": True}
    first = events(await client.post("/v1/responses", json=body))
    assert [event["type"] for event in first[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    path = f"/v1/responses/{first[0]['response']['id']}"
    again = await client.get(path, params={"stream": "true"})
    assert events(again) == first
    rest = await client.get(path, params={"stream": "true", "starting_after": 4})
    assert rest.text == again.text[again.text.index("event: " + first[5]["type"]) :]
    beyond = await client.get(path, params={"stream": "true", "starting_after": 1000})
    assert (beyond.status_code, beyond.text) == (200, "")
    error(await client.get(path, params={"starting_after": 1}), 400, "starting_after")


async def test_only_what_was_streamed_can_be_streamed_again(client, respond):
    made = await respond(background=True)
    error(await client.get(f"/v1/responses/{made['id']}", params={"stream": "true"}), 400, "stream")


async def test_events_come_while_they_are_made(client, engine: FakeEngine):
    body = {"input": "hello", "max_output_tokens": 100, "background": True, "stream": True}
    posting = asyncio.create_task(client.post("/v1/responses", json=body))
    await until(lambda: engine.num_running == 1)
    whole = events(await posting)
    assert sum(event["type"] == "response.output_text.delta" for event in whole) == 100


# --- the store --------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(name: str, status: Any = "completed", size: int = 0) -> StoredResponse:
    response = Response(
        id=name, created_at=0, status=status, background=False, instructions=None, max_output_tokens=None,
        max_tool_calls=None, metadata={}, model="m", parallel_tool_calls=True, previous_response_id=None,
        reasoning=ReasoningConfig(), store=True, temperature=1.0, text=TextConfig({}), tool_choice="auto",
        tools=[], top_logprobs=0, top_p=1.0, truncation="disabled",
    )  # fmt: skip
    return StoredResponse(response, [], [], size)


def names(store: ResponseStore, *candidates: str) -> str:
    return "".join(name for name in candidates if name in store)


def test_the_oldest_go_first():
    store = ResponseStore(3 * OVERHEAD_BYTES, 100)
    for name in "abcd":
        store.put(entry(name))
    assert names(store, *"abcd") == "bcd"
    store.put(entry("b"))  # renewed
    store.put(entry("e"))
    assert names(store, *"abcde") == "bde"
    assert store.num_bytes == 3 * OVERHEAD_BYTES
    store.put(entry("big", size=10 * OVERHEAD_BYTES))
    assert len(store) == 0
    assert store.num_bytes == 0


def test_running_ones_stay():
    store = ResponseStore(2 * OVERHEAD_BYTES, 100)
    store.put(entry("a", "queued"))
    store.put(entry("b", "in_progress"))
    for name in "cd":
        store.put(entry(name))
    assert names(store, *"abcd") == "ab"
    with pytest.raises(QueueFullError):
        store.check_room()
    store.get("a").response.status = "completed"
    store.check_room()


def test_they_expire():
    clock = Clock()
    store = ResponseStore(1 << 20, 10, clock)
    store.put(entry("a"))
    store.put(entry("r", "in_progress"))
    clock.now = 9
    assert store.get("a")
    clock.now = 11
    with pytest.raises(ResponseNotFoundError):
        store.get("a")
    assert store.get("r")
    store.put(entry("b"))
    assert names(store, "a", "b", "r") == "br"


@pytest.fixture
async def small(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    engine.step_seconds = 0
    async with client_of(create_app(engine, ServerConfig(response_store_bytes=1 << 16), ["m"])) as client:
        yield client


async def test_memory_is_bounded(small: httpx.AsyncClient, engine: FakeEngine):
    made = [
        (await small.post("/v1/responses", json={"input": "x" * 8000, "max_output_tokens": 1})).json()["id"]
        for _ in range(20)
    ]
    kept = [(await small.get(f"/v1/responses/{name}")).status_code == 200 for name in made]
    assert kept == sorted(kept)
    assert 1 <= sum(kept) <= 8

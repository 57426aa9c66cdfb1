"""response_format and structured_outputs over HTTP: what reaches the engine, and how mistakes are named."""

from __future__ import annotations

import json

import pytest
from fake_engine import FakeEngine
from http_support import error

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.fixture(params=list(BODIES))
def endpoint(request) -> str:
    return request.param


async def post(client, endpoint: str, **fields: object):
    return await client.post(endpoint, json={**BODIES[endpoint], "max_tokens": 2, **fields})


async def constraint(client, engine: FakeEngine, endpoint: str, **fields: object):
    response = await post(client, endpoint, **fields)
    assert response.status_code == 200, response.text
    return engine.admitted[-1].params.structured_outputs


async def test_json_object(client, engine, endpoint):
    found = await constraint(client, engine, endpoint, response_format={"type": "json_object"})
    assert (found.kind, found.param) == ("json_object", "response_format")


@pytest.mark.parametrize("strict", [True, False, None])
async def test_json_schema(client, engine, endpoint, strict):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": strict}}
    found = await constraint(client, engine, endpoint, response_format=form)
    assert (found.kind, found.param) == ("json", "response_format")
    assert json.loads(found.json) == SCHEMA


async def test_structural_tag(client, engine, endpoint):
    found = await constraint(client, engine, endpoint, response_format={"type": "structural_tag", **TAG})
    assert json.loads(found.structural_tag) == {"type": "structural_tag", **TAG}


@pytest.mark.parametrize("form", [None, {"type": "text"}])
async def test_text_constrains_nothing(client, engine, endpoint, form):
    assert await constraint(client, engine, endpoint, response_format=form) is None


@pytest.mark.parametrize(
    "given",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a"'},
        {"json_object": True},
        {"structural_tag": json.dumps({"type": "structural_tag", **TAG})},
        {"json": SCHEMA, "disable_additional_properties": True, "whitespace_pattern": " ?"},
    ],
)
async def test_structured_outputs(client, engine, endpoint, given):
    found = await constraint(client, engine, endpoint, structured_outputs=given)
    assert found.kind == next(iter(given))
    assert found.param == "structured_outputs"
    assert found.disable_additional_properties is given.get("disable_additional_properties", False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": ["json_object"]}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"other": 1}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": 5}}, None),
        ({"structured_outputs": {"unknown": 5}}, None),
        ({"structured_outputs": {"regex": "a", "param": "x"}}, None),
        ({"structured_outputs": "a"}, None),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a"}, "use_beam_search": True}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_mistakes_are_named(client, engine, endpoint, fields, param):
    error(await post(client, endpoint, **fields), 400, param)
    assert not engine.admitted

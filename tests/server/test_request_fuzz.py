"""Whatever JSON a client sends, it gets an answer or a 4xx, never a 500, and nothing stays in the engine."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from fake_engine import FakeEngine
from http_support import client_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.openai.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.server.openai.tokenize import DetokenizeRequest, TokenizeRequest

numbers = st.integers(-3, 40) | st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**30]) | st.floats(-2, 2)
scalars = (
    st.none() | st.booleans() | numbers | st.text(max_size=5) | st.sampled_from(["fail", "auto", "none"])
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]) | values, "content": st.text() | values}
    ),
    max_size=3,
)
prompts = (
    st.text() | st.lists(st.integers(0, 300), max_size=4) | st.lists(st.text(max_size=3), max_size=4) | values
)
ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"prompt": prompts}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": messages}),
    "/tokenize": (TokenizeRequest, {"prompt": prompts, "messages": messages}),
    "/detokenize": (DetokenizeRequest, {"tokens": st.lists(st.integers(-1, 300)) | values}),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_value_of_any_field(endpoint, data):
    model, given_fields = ENDPOINTS[endpoint]
    names = st.sampled_from(sorted(model.model_fields)) | st.sampled_from(["tools", "suffix", "nonsense"])
    body = data.draw(st.dictionaries(names, values, max_size=4))
    for name, strategy in given_fields.items():
        if data.draw(st.booleans(), label=name):
            body[name] = data.draw(strategy)
    anyio.run(check, endpoint, body)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60))
def test_any_bytes(content):
    anyio.run(check, "/v1/completions", content)


async def check(endpoint: str, body: Any) -> None:
    engine = FakeEngine(max_model_len=64)
    async with client_of(create_app(engine, ServerConfig(), ["m"])) as client:
        headers = {"content-type": "application/json"}
        if isinstance(body, bytes):
            response = await client.post(endpoint, content=body, headers=headers)
        else:
            response = await client.post(endpoint, json=body)
    allowed = {200, 400, 404}
    if "fail" in str(body):
        allowed.add(500)  # the engine was told to fail
    assert response.status_code in allowed, (body, response.text)
    assert engine.num_running == 0

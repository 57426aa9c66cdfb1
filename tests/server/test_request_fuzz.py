"""Whatever JSON a client sends, it gets an answer or a 4xx, never a 500, and nothing stays in the engine."""

from __future__ import annotations

import functools
from typing import Any

import anyio
import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from http_support import client_of
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import until

from jaxserve.config import ServerConfig
from jaxserve.server.anthropic.requests import CountTokensRequest, MessageRequest
from jaxserve.server.app import create_app
from jaxserve.server.openai.chat_batch import BatchChatRequest
from jaxserve.server.openai.generate import GenerateRequest, GenerateSampling
from jaxserve.server.openai.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.server.openai.responses_api.requests import ResponseRequest
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
items = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]) | values},
        optional={
            "role": st.sampled_from(["user", "assistant"]) | values,
            "content": st.text() | values,
            "call_id": st.text(max_size=3) | values,
            "name": st.text(max_size=3) | values,
            "arguments": st.sampled_from(["{}", "{", "5"]) | values,
            "output": st.text() | values,
            "summary": values,
        },
    ),
    max_size=4,
)
blocks = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"]) | values},
        optional={
            "text": st.text() | values,
            "thinking": st.text() | values,
            "id": st.text(max_size=3) | values,
            "name": st.text(max_size=3) | values,
            "input": values,
            "tool_use_id": st.text(max_size=3) | values,
            "content": st.text() | values,
        },
    ),
    max_size=4,
)
turns = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"]) | values, "content": st.text() | blocks | values}
    ),
    max_size=3,
)
TOOLS = {"type": "object", "properties": {"a": {"type": "string"}}}
tools = values | st.sampled_from(
    [
        [{"type": "function", "name": "f", "parameters": TOOLS}],
        [{"name": "f", "input_schema": TOOLS}],
        [{"type": "function", "function": {"name": "f", "parameters": TOOLS}}],
    ]
)
choices = values | st.sampled_from(
    [
        "auto",
        "required",
        "none",
        {"type": "any"},
        {"type": "tool", "name": "f"},
        {"type": "function", "name": "f"},
    ]
)
ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"prompt": prompts}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": messages}),
    "/v1/responses": (
        ResponseRequest,
        {"input": st.text() | items | values, "tools": tools, "tool_choice": choices},
    ),
    "/v1/messages": (MessageRequest, {"messages": turns, "tools": tools, "tool_choice": choices}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": turns, "tools": tools}),
    "/v1/chat/completions/batch": (BatchChatRequest, {"messages": st.lists(messages, max_size=3) | values}),
    "/inference/v1/generate": (
        GenerateRequest,
        {
            "token_ids": st.lists(st.integers(-1, 300), max_size=4) | values,
            "sampling_params": values
            | st.dictionaries(st.sampled_from(sorted(GenerateSampling.model_fields)), values, max_size=3),
        },
    ),
    "/invocations": (CompletionRequest, {"prompt": prompts, "messages": messages, "token_ids": values}),
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
    if endpoint == "/v1/messages" and data.draw(st.booleans(), label="max_tokens"):
        body["max_tokens"] = 5
    anyio.run(check, endpoint, body)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=60))
def test_any_bytes(content):
    anyio.run(check, "/v1/completions", content)


@functools.cache
def served() -> tuple[FakeEngine, FastAPI]:
    """One application for all requests: none of them may spoil it for the next."""
    engine = FakeEngine(max_model_len=64)
    return engine, create_app(engine, ServerConfig(), ["m"])


async def check(endpoint: str, body: Any) -> None:
    engine, app = served()
    async with client_of(app) as client:
        headers = {"content-type": "application/json"}
        if isinstance(body, bytes):
            response = await client.post(endpoint, content=body, headers=headers)
        else:
            response = await client.post(endpoint, json=body)
        allowed = {200, 400, 404}
        if "fail" in str(body):
            allowed.add(500)  # the engine was told to fail
        assert response.status_code in allowed, (body, response.text)
        await until(lambda: engine.num_running == 0)  # in the background it may run a while

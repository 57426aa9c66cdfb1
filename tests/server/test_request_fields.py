"""A request's fields reach the engine, and defaults come in the right order."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import FakeEngine
from http_support import client_of

from jaxserve.config import ServerConfig
from jaxserve.sampling_params import RepetitionDetection, RequestOutputKind, SamplingParams
from jaxserve.server.app import create_app
from jaxserve.server.openai.requests import NOT_OVER_HTTP, ChatCompletionRequest, CompletionRequest
from jaxserve.structured_outputs_params import StructuredOutputsParams

pytestmark = pytest.mark.anyio

GIVEN = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "seed": -5,
    "stop": ["END", "\n\n\n"],
    "stop_token_ids": [250, 251],
    "ignore_eos": True,
    "min_tokens": 1,
    "prompt_logprobs": 2,
    "logit_bias": {"5": 1.5, "7": -100},
    "allowed_token_ids": [1, 2, 3],
    "bad_words": ["bad"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 100,
    "truncation_side": "right",
    "repetition_detection": {"max_pattern_size": 9, "min_count": 4},
    "structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": True},
}
EXPECTED = {
    **GIVEN,
    "logit_bias": {5: 1.5, 7: -100.0},
    "repetition_detection": RepetitionDetection(max_pattern_size=9, min_count=4),
    "structured_outputs": StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True),
}
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.fixture(params=list(BODIES))
def endpoint(request) -> str:
    return request.param


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest])
def test_every_sampling_parameter_is_a_field(model):
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert names - {"detokenize", "output_kind", "shown_special_tokens", "reasoning"} <= set(
        model.model_fields
    )
    assert set(GIVEN) == names - NOT_OVER_HTTP, "a new sampling parameter belongs into this test"


async def test_every_sampling_parameter_reaches_the_engine(client, engine: FakeEngine, endpoint):
    response = await client.post(endpoint, json={**BODIES[endpoint], **GIVEN, "max_tokens": 3})
    assert response.status_code == 200, response.text
    params = engine.admitted[0].params
    for name, value in EXPECTED.items():
        assert getattr(params, name) == value, name
    assert params.max_tokens == 3
    assert params.output_kind is RequestOutputKind.FINAL_ONLY


async def test_null_is_not_given(client, engine: FakeEngine, endpoint):
    nulls = dict.fromkeys([*GIVEN, "stream", "stream_options", "user", "priority", "cache_salt", "logprobs"])
    response = await client.post(endpoint, json={**BODIES[endpoint], **nulls, "max_tokens": 3})
    assert response.status_code == 200, response.text
    assert engine.admitted[0].params == SamplingParams(max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)


async def test_streams_ask_for_differences(client, engine: FakeEngine, endpoint):
    await client.post(endpoint, json={**BODIES[endpoint], "stream": True, "max_tokens": 1})
    assert engine.admitted[0].params.output_kind is RequestOutputKind.DELTA


async def test_priority_and_cache_salt(client, engine: FakeEngine, endpoint):
    salt = "c2FsdA==/+@\\"
    await client.post(
        endpoint, json={**BODIES[endpoint], "priority": -3, "cache_salt": salt, "max_tokens": 1}
    )
    assert (engine.admitted[0].priority, engine.admitted[0].cache_salt) == (-3, salt)


async def test_request_ids_in_the_engine_are_unique(client, engine: FakeEngine, endpoint):
    for _ in range(2):
        await client.post(endpoint, json={**BODIES[endpoint], "request_id": "same", "max_tokens": 1})
    first, second = (request.request_id for request in engine.admitted)
    assert "same" in first
    assert first != second


DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 7, "stop_token_ids": [200]}


async def sent(endpoint: str, **body: object) -> SamplingParams:
    engine = FakeEngine(defaults=DEFAULTS)
    async with client_of(create_app(engine, ServerConfig(), ["m"])) as client:
        response = await client.post(endpoint, json={**BODIES[endpoint], **body})
        assert response.status_code == 200, response.text
    return engine.admitted[0].params


async def test_the_models_defaults(endpoint):
    params = await sent(endpoint)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.95, 7)


async def test_the_request_wins_over_the_models_defaults(endpoint):
    params = await sent(endpoint, temperature=0, max_tokens=9)
    assert (params.temperature, params.max_tokens) == (0.0, 9)


async def test_stop_token_ids_are_added_to_the_models(endpoint):
    assert (await sent(endpoint)).stop_token_ids == [200]
    assert (await sent(endpoint, stop_token_ids=[201, 200])).stop_token_ids == [200, 201]


async def test_logprobs_of_chat(client, engine: FakeEngine):
    for body, expected in [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)]:
        await client.post(
            "/v1/chat/completions", json={**BODIES["/v1/chat/completions"], **body, "max_tokens": 1}
        )
        assert engine.admitted[-1].params.logprobs == expected


async def test_echo_asks_for_the_prompts_logprobs(client, engine: FakeEngine):
    await client.post("/v1/completions", json={"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 1})
    assert engine.admitted[0].params.prompt_logprobs == 2

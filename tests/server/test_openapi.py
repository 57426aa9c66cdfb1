"""The OpenAPI document: every answer and error is declared, and its limits are those that are enforced."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.openapi import ANSWERS, LIMITS

UNDESCRIBED = {("post", "/invocations"), ("get", "/version"), ("get", "/load")}


@pytest.fixture
def document(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_every_path_says_what_it_answers(document):
    found = operations(document)
    assert set(found) - set(ANSWERS) == UNDESCRIBED, "describe a new path in ANSWERS"
    for (_, path), operation in found.items():
        responses = operation["responses"]
        assert set(responses) == {"200", "400", "401", "404", "413", "500", "503"}
        error = responses["400"]["content"]["application/json"]["schema"]["$ref"]
        assert error.endswith("AnthropicErrorBody") == path.startswith("/v1/messages")


def test_references_lead_somewhere(document):
    schemas = document["components"]["schemas"]

    def check(value: Any) -> None:
        if isinstance(value, dict):
            reference = value.get("$ref")
            if isinstance(reference, str):
                assert reference.removeprefix("#/components/schemas/") in schemas
            for inner in value.values():
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(document)
    assert "HTTPValidationError" not in schemas


def test_models_are_named(document):
    for name in ("ChatCompletionRequest", "ResponseRequest", "MessageRequest"):
        model = document["components"]["schemas"][name]["properties"]["model"]
        assert model["anyOf"][0]["enum"] == ["fake-model", "alias"]


def refused(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except InvalidRequestError:
        return True
    return False


@pytest.mark.parametrize("name", sorted(LIMITS.keys() & set(SamplingParams.__struct_fields__)))
def test_limits_are_enforced(name):
    limits = LIMITS[name]
    for keyword, step in (("minimum", -1), ("maximum", 1)):
        if keyword in limits:
            assert not refused(name, limits[keyword])
            assert refused(name, limits[keyword] + step)
    if "exclusiveMinimum" in limits:
        assert refused(name, limits["exclusiveMinimum"])
        assert not refused(name, limits["exclusiveMinimum"] + 0.5)
    if "minItems" in limits:
        assert refused(name, [])
    if "maxItems" in limits:
        assert refused(name, ["a"] * (limits["maxItems"] + 1))
        assert not refused(name, ["a"] * limits["maxItems"])
    item = limits.get("items", {})
    if "minLength" in item:
        assert refused(name, [""])
    if "minimum" in item:
        assert refused(name, [-1])
    if "maxProperties" in limits:
        assert refused(name, dict.fromkeys(range(limits["maxProperties"] + 1), 0.0))

"""StructuredOutputsParams: exactly one constraint, of the right type, within limits; the mistake is named."""

from __future__ import annotations

import msgspec
import pytest

from jaxserve import SamplingParams, StructuredOutputsParams
from jaxserve.errors import InvalidRequestError
from jaxserve.structured_outputs_params import MAX_NESTING, json_schema_output


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[1]"}, "structured_outputs.json"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json"),
        ({"json": {"const": "\ud800"}}, "structured_outputs.json"),
        ({"json": {"const": object()}}, "structured_outputs.json"),
        ({"json": nested(MAX_NESTING + 1)}, "structured_outputs.json"),
        ({"json": '{"items":' * 100_000 + "1" + "}" * 100_000}, "structured_outputs.json"),
        ({"json": {"const": "x" * 300_000}}, "structured_outputs.json"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "a\0"}, "structured_outputs.regex"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"regex": "x" * 300_000}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": "abc"}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"choice": ["a"] * 5000}, "structured_outputs.choice"),
        ({"grammar": " \n"}, "structured_outputs.grammar"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ({"json": {}, "disable_any_whitespace": "yes"}, "structured_outputs.disable_any_whitespace"),
        (
            {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern",
        ),
    ],
)
def test_mistakes_are_named(given, param):
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**given)
    assert caught.value.param == param
    assert len(caught.value.message) < 400


def test_the_deepest_schema_is_taken():
    StructuredOutputsParams(json=nested(MAX_NESTING))


def test_a_schema_is_kept_as_text_with_its_keys_in_order():
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    params = StructuredOutputsParams(json=schema)
    schema["properties"]["later"] = {}
    assert params.json == '{"type":"object","properties":{"z":{},"a":{}}}'
    assert (params.kind, params.spec) == ("json", params.json)


def test_it_crosses_to_the_engine_core():
    for constraint in (
        StructuredOutputsParams(json={"type": "object"}, disable_additional_properties=True),
        StructuredOutputsParams(choice=["a", "b"], param="tools"),
    ):
        params = SamplingParams(structured_outputs=constraint)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_other_types_are_refused():
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(structured_outputs={"regex": "a"})
    assert caught.value.param == "structured_outputs"


def test_schemas_of_other_parameters():
    assert json_schema_output({"type": "object"}, param="text.format").param_of("json") == "text.format"
    with pytest.raises(InvalidRequestError, match=r"^text\.format is nested") as caught:
        json_schema_output(nested(100), param="text.format")
    assert caught.value.param == "text.format"

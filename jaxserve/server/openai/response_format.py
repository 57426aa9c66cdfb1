"""``response_format`` of chat completions and completions, as the constraint that it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, PlainValidator

from jaxserve.errors import InvalidRequestError
from jaxserve.structured_outputs_params import StructuredOutputsParams, json_schema_output

PARAM = "response_format"
_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "structural_tag": {"type", "structures", "triggers", "format"},
}
_SCHEMA_KEYS = {"name", "description", "schema", "strict"}


class JSONSchemaField(BaseModel):
    """A named JSON schema, for the API's schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormatField(BaseModel):
    """The form of an answer, for the API's schema."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchemaField | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


def parse_response_format(value: Any) -> StructuredOutputsParams | None:
    """The constraint of a ``response_format``; None for text.

    Raises:
        InvalidRequestError: it is malformed.
    """
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _error("must be an object.")
    form = cast("dict[str, Any]", value)
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise _error(f"type must be one of {', '.join(_KEYS)}, got {str(kind)[:40]!r}.")
    _refuse_unknown(form, _KEYS[kind])
    match kind:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True, param=PARAM)
        case "json_schema":
            return _json_schema(form.get("json_schema"))
        case _:
            return StructuredOutputsParams(structural_tag=form, param=PARAM)


def _json_schema(value: Any) -> StructuredOutputsParams:
    if not isinstance(value, dict):
        raise _error("of type json_schema needs json_schema: an object with a name and a schema.")
    named = cast("dict[str, Any]", value)
    _refuse_unknown(named, _SCHEMA_KEYS)
    for name, kind in (("name", str), ("description", str), ("strict", bool), ("schema", dict)):
        if named.get(name) is not None and not isinstance(named[name], kind):
            raise _error(
                f"json_schema.{name} must be of type {kind.__name__}, got {str(named[name])[:40]!r}."
            )
    if named.get("schema") is None:
        return StructuredOutputsParams(json_object=True, param=PARAM)
    return json_schema_output(named["schema"], param=PARAM)


def _refuse_unknown(form: dict[str, Any], known: set[str]) -> None:
    for name in form:
        if name not in known:
            raise _error(f"has the unknown field {name[:40]!r}.")


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{PARAM} {message}", param=PARAM)


ResponseFormat = Annotated[
    StructuredOutputsParams | None,
    PlainValidator(parse_response_format, json_schema_input_type=ResponseFormatField | None),
]

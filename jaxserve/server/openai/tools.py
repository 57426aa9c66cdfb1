"""``tools`` and ``tool_choice``: checked field by field, in the form that templates and parsers take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import BaseModel

from jaxserve.errors import InvalidRequestError, UnsupportedError

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that says nothing about its parameters: it takes none."""
MODES = ("none", "auto", "required")

Mode = Literal["none", "auto", "required"]


class FunctionField(BaseModel):
    """A function, for the API's schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(BaseModel):
    """A tool, for the API's schema."""

    type: Literal["function"] = "function"
    function: FunctionField


class FunctionNameField(BaseModel):
    """A function's name, for the API's schema."""

    name: str


class NamedToolField(BaseModel):
    """A function that must be called, for the API's schema."""

    type: Literal["function"] = "function"
    function: FunctionNameField


@dataclass(frozen=True)
class ToolChoice:
    """Whether and which calls an answer may hold.

    Args:
        mode: ``auto`` leaves it to the model, ``required`` asks for at least one call.
        allowed: the names that may be called; None allows all.
        named: the one function that must be called, with nothing else.
    """

    mode: Mode
    allowed: frozenset[str] | None = None
    named: str | None = None


def check_tools(value: Any) -> list[dict[str, Any]]:
    """The tools in OpenAI's form: ``{"type": "function", "function": {name, description, parameters}}``.

    Raises:
        InvalidRequestError: with the field's path, such as ``tools[0].function.name``.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("tools must be a list of at least one tool.", param="tools")
    tools = cast("list[Any]", value)
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools holds {len(tools)}; at most {MAX_TOOLS} are allowed.", param="tools"
        )
    checked = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    seen: set[str] = set()
    for index, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in seen:
            path = f"tools[{index}].function.name"
            raise InvalidRequestError(f"{path}: there are two tools called {name!r}.", param=path)
        seen.add(name)
    return checked


def _check_tool(tool: Any, path: str) -> dict[str, Any]:
    fields = _object(tool, path)
    kind = fields.get("type", "function")
    if kind != "function":
        raise UnsupportedError(
            f"{path}.type {repr(kind)[:100]} is not supported: only functions are.", param=f"{path}.type"
        )
    _refuse_unknown(fields, ("type", "function"), path)
    path = f"{path}.function"
    function = _object(fields.get("function"), path)
    _refuse_unknown(function, _FUNCTION_FIELDS, path)
    given = {name: value for name, value in function.items() if value is not None}
    name = given.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f"{path}.name must be 1 to 64 letters, digits, underscores, dots and dashes, got {repr(name)[:100]}.",
            param=f"{path}.name",
        )
    if not isinstance(given.get("description", ""), str):
        raise InvalidRequestError(f"{path}.description must be a string.", param=f"{path}.description")
    if not isinstance(given.get("strict", False), bool):
        raise InvalidRequestError(f"{path}.strict must be true or false.", param=f"{path}.strict")
    given["parameters"] = _check_parameters(given.get("parameters", NO_PARAMETERS), f"{path}.parameters")
    return {"type": "function", "function": given}


def _check_parameters(schema: Any, path: str) -> dict[str, Any]:
    """The schema of a call's arguments, which are an object even where it does not say so."""
    fields = _object(schema, path)
    if fields.get("type", "object") != "object":
        raise InvalidRequestError(
            f"{path}.type must be 'object', got {repr(fields['type'])[:100]}: a call's arguments are an object.",
            param=f"{path}.type",
        )
    _check_schema(fields, path)
    return {"type": "object", **fields}


_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")


def _check_schema(schema: Any, path: str) -> None:
    """Refuse what is no JSON schema; what a grammar makes of one is the grammar's affair."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{path} must be a JSON schema (an object).", param=path)
    fields = cast("dict[str, Any]", schema)
    kinds: Any = fields.get("type", [])
    for kind in cast("list[Any]", kinds) if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise InvalidRequestError(
                f"{path}.type must be among {', '.join(_TYPES)}, got {repr(kind)[:100]}.",
                param=f"{path}.type",
            )
    for name, kind in (("required", str), ("enum", object)):
        values: Any = fields.get(name, [])
        if not isinstance(values, list) or not all(isinstance(v, kind) for v in cast("list[Any]", values)):
            what = "names" if kind is str else "values"
            raise InvalidRequestError(f"{path}.{name} must be a list of {what}.", param=f"{path}.{name}")
    for name in _OF_SCHEMAS:
        for key, inner in _object(fields.get(name, {}), f"{path}.{name}").items():
            _check_schema(inner, f"{path}.{name}.{key[:100]}")
    for name in _SCHEMA_LISTS:
        options: Any = fields.get(name, [])
        if not isinstance(options, list):
            raise InvalidRequestError(f"{path}.{name} must be a list of schemas.", param=f"{path}.{name}")
        for index, inner in enumerate(cast("list[Any]", options)):
            _check_schema(inner, f"{path}.{name}[{index}]")
    for name in _SCHEMAS:
        # Older schemas have a list of items.
        if name in fields and not (name == "items" and isinstance(fields[name], list)):
            _check_schema(fields[name], f"{path}.{name}")


def check_tool_choice(value: Any) -> ToolChoice:
    """What ``tool_choice`` asks for, before it is known which tools there are.

    Raises:
        InvalidRequestError: with the field's path.
    """
    if isinstance(value, str):
        if value not in MODES:
            raise InvalidRequestError(
                f"tool_choice must be one of {', '.join(MODES)} or name a function, got {value[:100]!r}.",
                param="tool_choice",
            )
        return ToolChoice(value)
    fields = _object(value, "tool_choice")
    if fields.get("type") == "allowed_tools":
        return _allowed_tools(_object(fields.get("allowed_tools"), "tool_choice.allowed_tools"))
    if fields.get("type", "function") != "function":
        raise UnsupportedError(
            f"tool_choice.type {repr(fields['type'])[:100]} is not supported: use 'function'.",
            param="tool_choice.type",
        )
    return ToolChoice("required", named=_function_name(fields, "tool_choice"))


def _allowed_tools(fields: Mapping[str, Any]) -> ToolChoice:
    path = "tool_choice.allowed_tools"
    mode = fields.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"{path}.mode must be 'auto' or 'required'.", param=f"{path}.mode")
    tools = fields.get("tools")
    if not isinstance(tools, list) or not tools:
        raise InvalidRequestError(f"{path}.tools must be a list of tools.", param=f"{path}.tools")
    names = [
        _function_name(_object(tool, f"{path}.tools[{index}]"), f"{path}.tools[{index}]")
        for index, tool in enumerate(cast("list[Any]", tools))
    ]
    return ToolChoice(mode, frozenset(names))


def _function_name(fields: Mapping[str, Any], path: str) -> str:
    function = _object(fields.get("function"), f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{path}.function.name must be a string.", param=f"{path}.function.name")
    return name


def resolve_choice(choice: ToolChoice | None, tools: Sequence[Mapping[str, Any]] | None) -> ToolChoice:
    """What holds for a request with these (checked) tools; ``auto`` is the default if there are any.

    Raises:
        InvalidRequestError: it names a tool that there is not, or needs tools and there are none.
    """
    if not tools:
        if choice is not None and choice.mode != "none":
            raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
        return ToolChoice("none")
    if choice is None:
        return ToolChoice("auto")
    names = {tool["function"]["name"] for tool in tools}
    wanted = choice.allowed or ({choice.named} if choice.named is not None else set())
    for name in sorted(wanted - names):
        raise InvalidRequestError(
            f"tool_choice names {name[:100]!r}, which is not among the tools.", param="tool_choice"
        )
    return choice


def schemas_of(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> dict[str, Mapping[str, Any]]:
    """Name to schema of what may be called."""
    functions = [tool["function"] for tool in tools]
    allowed = choice.allowed if choice.named is None else frozenset([choice.named])
    return {f["name"]: f["parameters"] for f in functions if allowed is None or f["name"] in allowed}


def calls_schema(schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls, ``[{"name": …, "parameters": …}]``, with at least one."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for name, schema in schemas.items():
        parameters, hoisted = _hoist(schema)
        definitions.update(hoisted)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    result: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if not parallel:
        result["maxItems"] = 1
    if definitions:
        result["$defs"] = definitions
    return result


def _hoist(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema without its definitions, and these: ``#/$defs/…`` refers to the root of the whole."""
    definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
    rest = {key: value for key, value in schema.items() if key not in ("definitions", "$defs")}
    if "definitions" in schema:
        text = json.dumps([rest, definitions]).replace('"#/definitions/', '"#/$defs/')
        rest, definitions = json.loads(text)
    return rest, definitions


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object, got {repr(value)[:100]}.", param=path)
    return cast("dict[str, Any]", value)


def _refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    for name in fields:
        if name not in known:
            raise InvalidRequestError(f"Unknown field {path}.{name[:100]}.", param=f"{path}.{name[:100]}")

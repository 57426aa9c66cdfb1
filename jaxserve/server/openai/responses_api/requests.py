"""The body of POST /v1/responses. A field is honoured, accepted because it changes nothing, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, StringConstraints, model_validator

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.server.field_names import AsksNothing, choice_field, known_fields, neutral, text_field
from jaxserve.server.openai.requests import (
    SAMPLING_FIELDS,
    STRICT,
    Bounded,
    Identifier,
    Int64,
    List,
    check_length,
)
from jaxserve.server.openai.responses_api.input_items import InputItem, parse_input
from jaxserve.server.openai.tools import ToolChoice, check_tool_choice, check_tools
from jaxserve.server.openai.unsupported import UNSUPPORTED as UNSUPPORTED_IN_CHAT
from jaxserve.server.sampling_fields import sampling_fields_without
from jaxserve.structured_outputs_params import StructuredOutputsParams, json_schema_output

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16

NOT_HERE = frozenset({"n", "prompt_logprobs"})
"""Sampling fields that a response has no place for."""

SamplingFieldsHere: type[BaseModel] = sampling_fields_without("ResponseSamplingFields", NOT_HERE)

UNSUPPORTED: dict[str, AsksNothing] = {
    "access_programs": neutral(),
    "background_options": neutral(),
    "context_management": neutral([]),
    "conversation": neutral(),
    "image": neutral(),
    "moderation": neutral(),
    "n": neutral(1),
    "prompt": neutral(),
    "prompt_cache_options": neutral(),
    "prompt_logprobs": neutral(),
    # vLLM
    "enable_response_messages": neutral(False),
    "previous_input_messages": neutral(),
    **{
        name: neutral()
        for name in UNSUPPORTED_IN_CHAT
        if name not in ("tools", "tool_choice", "reasoning_effort", "response_format", "verbosity")
    },
}


# --- tools -------------------------------------------------------------------------------------------------


class FunctionTool(BaseModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(BaseModel):
    """The model must call this function."""

    type: Literal["function"]
    name: str


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """The functions, as they were sent.

    Raises:
        InvalidRequestError: with the field's path, such as ``tools[0].parameters``.
    """
    if not isinstance(value, list):
        raise InvalidRequestError("tools must be a list.", param="tools")
    tools = [_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(cast("list[Any]", value))]
    if tools:
        chat_tools(tools)
    return tools


def _parse_tool(tool: Any, path: str) -> dict[str, Any]:
    kind = cast("dict[str, Any]", tool).get("type") if isinstance(tool, dict) else "function"
    if kind != "function":
        raise UnsupportedError(
            f"{path}.type {repr(kind)[:100]} is not supported by this server: it takes functions only.",
            param=f"{path}.type",
        )
    return known_fields(
        tool,
        path,
        ("type", "name", "description", "parameters", "strict"),
        {
            "allowed_callers": neutral(["direct"]),
            "async": neutral(False),
            "defer_loading": neutral(False),
            "output_schema": neutral(),
        },
    )


def chat_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The functions in the form of chat completions, checked."""
    chat = [
        {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}
        for tool in tools
    ]
    try:
        return check_tools(chat)
    except InvalidRequestError as error:  # it names chat's fields
        path = (error.param or "tools").replace(".function", "")
        raise InvalidRequestError(error.message.replace(".function", ""), param=path) from None


def parse_tool_choice(value: Any) -> str | dict[str, Any]:
    """``none``, ``auto``, ``required``, a function, or the tools that may be used, as they were sent.

    Raises:
        InvalidRequestError: another value.
    """
    chat_tool_choice(value)
    return value


def chat_tool_choice(value: Any) -> ToolChoice:
    """The choice as chat completions understand it."""
    if not isinstance(value, dict):
        return check_tool_choice(value)
    fields = known_fields(value, "tool_choice", ("type", "name", "mode", "tools"))
    if fields.get("type") == "allowed_tools":
        names = [
            text_field(known_fields(tool, path, ("type", "name")), "name", path)
            for path, tool in _numbered(fields.get("tools"), "tool_choice.tools")
        ]
        mode = choice_field(fields, "mode", "tool_choice", ("auto", "required"))
        return ToolChoice(cast(Literal["auto", "required"], mode), frozenset(names))
    if fields.get("type") != "function":
        raise UnsupportedError(
            f"tool_choice.type {repr(fields.get('type'))[:100]} is not supported: use 'function'.",
            param="tool_choice.type",
        )
    return ToolChoice("required", named=text_field(fields, "name", "tool_choice"))


def _numbered(value: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{path} must be a list of at least one tool.", param=path)
    return [(f"{path}[{index}]", item) for index, item in enumerate(cast("list[Any]", value))]


# --- text --------------------------------------------------------------------------------------------------


class PlainFormat(BaseModel):
    """No constraint, or any JSON object."""

    type: Literal["text", "json_object"]


class JSONSchemaFormat(BaseModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(BaseModel):
    """The form of the text."""

    format: PlainFormat | JSONSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


def parse_text(value: Any) -> dict[str, Any]:
    """The text's format, checked: ``{"type": "text"}`` and the like.

    Raises:
        InvalidRequestError: with the field's path, such as ``text.format.schema``.
    """
    fields = known_fields(value, "text", ("format",), {"verbosity": neutral("medium")})
    if "format" not in fields:
        return {"type": "text"}
    path = "text.format"
    given = known_fields(fields["format"], path, ("type", "name", "schema", "description", "strict"))
    if choice_field(given, "type", path, ("text", "json_object", "json_schema")) == "json_schema":
        text_field(given, "name", path)
        text_field(given, "description", path, "")
        if not isinstance(given.get("schema"), dict):
            raise InvalidRequestError(f"{path}.schema must be a JSON schema.", param=f"{path}.schema")
        if not isinstance(given.get("strict", False), bool):
            raise InvalidRequestError(f"{path}.strict must be true or false.", param=f"{path}.strict")
    return given


def format_constraint(text_format: dict[str, Any]) -> StructuredOutputsParams | None:
    """What the format asks of the output; None is nothing.

    Raises:
        InvalidRequestError: the schema is too large or too deep.
    """
    match text_format["type"]:
        case "json_schema":
            return json_schema_output(text_format["schema"], param="text.format")
        case "json_object":
            return StructuredOutputsParams(json_object=True, param="text.format")
        case _:
            return None


# --- the body ----------------------------------------------------------------------------------------------


class Reasoning(Bounded):
    """How much to think. A summary is never made: ``auto`` leaves that to the server."""

    model_config = STRICT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamOptions(Bounded):
    """What a stream carries beside its events."""

    model_config = STRICT

    include_obfuscation: Literal[False] | None = None


class ResponseRequest(SamplingFieldsHere):
    """POST /v1/responses."""

    model_config = STRICT

    input: Annotated[
        list[dict[str, Any]], PlainValidator(parse_input, json_schema_input_type=str | list[InputItem])
    ]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: List[Literal["message.output_text.logprobs"]] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    tools: (
        Annotated[
            list[dict[str, Any]], PlainValidator(parse_tools, json_schema_input_type=list[FunctionTool])
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[
            str | dict[str, Any],
            PlainValidator(
                parse_tool_choice,
                json_schema_input_type=Literal["none", "auto", "required"] | NamedFunction,
            ),
        ]
        | None
    ) = None
    text: Annotated[dict[str, Any], PlainValidator(parse_text, json_schema_input_type=TextOptions)] | None = (
        None
    )
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=MAX_METADATA),
            BeforeValidator(check_length(MAX_METADATA)),
        ]
        | None
    ) = None

    # vLLM's
    priority: Int64 | None = None
    request_id: Identifier | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Int64 | None = None

    # Accepted: there are no tools but the client's to limit, and the rest is the provider's bookkeeping.
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, body: Any) -> Any:
        return known_fields(body, "", cls.model_fields, UNSUPPORTED)

    @model_validator(mode="after")
    def _check_combinations(self) -> ResponseRequest:
        if self.background and self.store is False:
            raise InvalidRequestError(
                "background=true needs store=true: the response is fetched later.", param="background"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
        if self.sampling_values().get("structured_outputs") and self.constraint is not None:
            raise InvalidRequestError(
                "text.format and structured_outputs both constrain the output; send one of them.",
                param="structured_outputs",
            )
        return self

    def sampling_values(self) -> dict[str, Any]:
        """The sampling fields that the request sets."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS if name not in NOT_HERE}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def chat_tools(self) -> list[dict[str, Any]] | None:
        """The tools in the form of chat completions."""
        return chat_tools(self.tools) if self.tools else None

    @property
    def chat_tool_choice(self) -> ToolChoice | None:
        """The choice among them. ``auto`` without tools, as answers repeat it, asks for nothing."""
        if self.tool_choice is None or (self.tool_choice == "auto" and not self.tools):
            return None
        return chat_tool_choice(self.tool_choice)

    @property
    def text_format(self) -> dict[str, Any]:
        """``{"type": "text"}`` and the like."""
        return self.text or {"type": "text"}

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """What ``text.format`` asks of the output."""
        return format_constraint(self.text_format)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to list for every token; None lists none."""
        if self.top_logprobs is None and LOGPROBS not in (self.include or ()):
            return None
        return self.top_logprobs or 0

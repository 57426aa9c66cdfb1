"""Request bodies of OpenAI's endpoints. Sampling fields come from SamplingParams: a new one needs no line.

A field is honoured, accepted because it changes nothing about generation, or refused by name.
"""

from __future__ import annotations

import difflib
import types
import typing
import warnings
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    create_model,
    model_validator,
)

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from jaxserve.server.openai.messages import ChatMessage, check_messages
from jaxserve.server.openai.prompts import CompletionPrompt, parse_prompts
from jaxserve.server.openai.response_format import ResponseFormat
from jaxserve.server.openai.tools import (
    NamedToolField,
    ToolChoice,
    ToolField,
    check_tool_choice,
    check_tools,
)
from jaxserve.server.openai.unsupported import UNSUPPORTED

T = TypeVar("T")

STRICT = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
"""What crosses to the engine core in msgpack."""

Identifier = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]+$")]
"""Printable ASCII without spaces: it ends up in logs and headers."""

MAX_FIELDS = 256

List = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first mistake is reported: listing millions would take minutes and gigabytes."""

NOT_OVER_HTTP = frozenset(
    {"detokenize", "output_kind", "max_tokens", "logprobs", "shown_special_tokens", "reasoning", "param"}
)
"""Fields of SamplingParams that an endpoint decides or declares itself."""


def check_length(limit: int, param: str | None = None) -> Callable[[Any], Any]:
    """A validator for objects that refuses more than ``limit`` entries before it looks at any.

    Args:
        limit: entries.
        param: how the request spells the object; None leaves that to pydantic.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and (count := len(cast("dict[Any, Any]", value))) > limit:
            message = f"{param or 'the object'} has {count} entries; at most {limit} are allowed."
            raise ValueError(message) if param is None else InvalidRequestError(message, param=param)
        return value

    return check


class Bounded(BaseModel):
    """An object that is refused at once if it has far more fields than any: listing them all took minutes."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        return check_length(MAX_FIELDS)(value)


def _token_id_keys(value: dict[str, float]) -> dict[int, float]:
    """JSON spells token ids as strings when they are keys."""
    result: dict[int, float] = {}
    for key, bias in value.items():
        if not key.isdecimal() or len(key) > 18:
            raise InvalidRequestError(f"logit_bias: {key[:40]!r} is not a token id.", param="logit_bias")
        result[int(key)] = bias
    return result


def _http_type(annotation: Any) -> Any:
    """The annotation of a SamplingParams field, as JSON spells it and within the wire's limits."""
    if annotation is int:
        return Int64
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _struct_type(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_http_type(argument) for argument in arguments)]  # noqa: UP007
    if origin is list:
        return List[_http_type(arguments[0])]
    if origin is dict and arguments[0] is int:
        return Annotated[
            dict[str, float],
            AfterValidator(_token_id_keys),
            BeforeValidator(check_length(MAX_LOGIT_BIAS, "logit_bias")),
        ]
    return annotation


def _struct_type(struct: type[msgspec.Struct]) -> Any:
    """A struct among the sampling parameters, as a JSON object with its fields."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(struct):
        if field.name in NOT_OVER_HTTP:
            continue
        default = ... if field.required else field.default
        fields[field.name] = (_http_type(field.type), default)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a field named json hides pydantic's deprecated method
        model = create_model(struct.__name__, __base__=Bounded, __doc__=struct.__doc__, **fields)

    def to_struct(value: BaseModel) -> msgspec.Struct:
        return struct(**{name: getattr(value, name) for name in value.model_fields_set})

    return Annotated[model, AfterValidator(to_struct)]


def _sampling_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(SamplingParams):
        if field.name not in NOT_OVER_HTTP:
            fields[field.name] = (_http_type(field.type) | None, None)
    return fields


SAMPLING_FIELDS = tuple(_sampling_fields())

SamplingFields: type[BaseModel] = create_model("SamplingFields", __base__=Bounded, **_sampling_fields())
"""The fields of SamplingParams that every generating endpoint takes; None (or null) is not given."""


class StreamOptions(Bounded):
    """What a stream carries beside the text."""

    model_config = STRICT

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(SamplingFields):
    """What completions and chat completions have in common."""

    model_config = STRICT
    endpoint: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    request_id: Identifier | None = None
    cache_salt: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Accepted: they are for the provider's bookkeeping and change nothing about generation.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    session_id: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise InvalidRequestError("The body must be a JSON object.")
        body = cast("dict[str, Any]", body)
        return {name: value for name, value in body.items() if _is_ours(cls, name, value, body)}

    @model_validator(mode="after")
    def _check_one_constraint(self) -> GenerationRequest:
        if self.response_format is not None and getattr(self, "structured_outputs", None) is not None:
            raise InvalidRequestError(
                "response_format and structured_outputs both constrain the output; send one of them.",
                param="structured_outputs",
            )
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
        return self

    def sampling_values(self) -> dict[str, Any]:
        """The sampling fields that the request sets."""
        values = {
            name: getattr(self, name) for name in (*SAMPLING_FIELDS, "use_beam_search", "length_penalty")
        }
        values = {name: value for name, value in values.items() if value is not None}
        if self.response_format is not None:
            values["structured_outputs"] = self.response_format
        return values

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries usage; as in vLLM only together with ``include_usage``."""
        options = self.stream_options
        return options is not None and self.include_usage and bool(options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    endpoint = "completions"

    prompt: Annotated[
        list[CompletionPrompt],
        PlainValidator(parse_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: Int64 | None = None
    logprobs: Int64 | None = None
    echo: bool | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    endpoint = "chat completions"

    messages: Annotated[
        list[dict[str, Any]], PlainValidator(check_messages, json_schema_input_type=list[ChatMessage])
    ]
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: List[dict[str, Any]] | None = None
    return_prompt_text: bool | None = None

    tools: (
        Annotated[list[dict[str, Any]], PlainValidator(check_tools, json_schema_input_type=list[ToolField])]
        | None
    ) = None
    tool_choice: (
        Annotated[
            ToolChoice,
            PlainValidator(
                check_tool_choice,
                json_schema_input_type=Literal["none", "auto", "required"] | NamedToolField,
            ),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Int64 | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true.",
                param="continue_final_message",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        return self


def _is_ours(cls: type[GenerationRequest], name: str, value: Any, body: dict[str, Any]) -> bool:
    """Whether ``name`` is a field of ``cls``; False for one that is not offered but asks for nothing.

    Raises:
        UnsupportedError: it asks for something that is not offered.
        InvalidRequestError: nobody knows it.
    """
    if name in cls.model_fields:
        return True
    if name in UNSUPPORTED:
        if UNSUPPORTED[name](value, body):
            return False
        raise UnsupportedError(f"{name} is not supported by this server; remove it.", param=name)
    close = difflib.get_close_matches(name, cls.model_fields, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise InvalidRequestError(
        f"Unknown parameter for {cls.endpoint}: {name[:100]!r}.{hint}", param=name[:100]
    )

"""Bodies of /v1/messages and its token count. A field is honoured, accepted because it changes nothing, or refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.server.anthropic.content import HINTS, Message, TextBlock, parse_messages, parse_system
from jaxserve.server.conversation import Conversation, thinking_switches
from jaxserve.server.field_names import AsksNothing, choice_field, known_fields, neutral, text_field
from jaxserve.server.generation import GenerationService
from jaxserve.server.openai.requests import SAMPLING_FIELDS, STRICT, Bounded, Identifier, Int64, List
from jaxserve.server.openai.tools import ToolChoice, check_tools, resolve_choice
from jaxserve.server.openai.unsupported import UNSUPPORTED as UNSUPPORTED_IN_CHAT
from jaxserve.server.sampling_fields import sampling_fields_without
from jaxserve.structured_outputs_params import StructuredOutputsParams, json_schema_output

NAMES = {"reasoning_effort": "output_config.effort", "thinking_token_budget": "thinking.budget_tokens"}
"""How this protocol spells what chat completions spell otherwise."""

MIN_THINKING_BUDGET = 1024
"""Anthropic's."""

NOT_HERE = frozenset({"n", "prompt_logprobs", "stop"})
"""Sampling fields that a message has no place for, or another name."""

SamplingFieldsHere: type[BaseModel] = sampling_fields_without("MessageSamplingFields", NOT_HERE)

UNSUPPORTED: dict[str, AsksNothing] = {
    "container": neutral(),
    "context_management": neutral(),
    "diagnostics": neutral(),
    "fallbacks": neutral(),
    "inference_geo": neutral(),
    "mcp_servers": neutral([]),
    "n": neutral(1),
    "prompt_logprobs": neutral(),
    "speed": neutral("standard"),
    "stop": neutral(),
    "user_profile_id": neutral(),
    "workspace_id": neutral(),
    **{name: neutral() for name in UNSUPPORTED_IN_CHAT if name not in ("tools", "tool_choice")},
}


# --- tools -------------------------------------------------------------------------------------------------


class Tool(BaseModel):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoiceMode(BaseModel):
    """Whether the model calls."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(BaseModel):
    """Which tool the model must call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """The tools in the form of OpenAI's chat.

    Raises:
        InvalidRequestError: with the field's path, such as ``tools[0].input_schema``.
    """
    if not isinstance(value, list):
        raise InvalidRequestError("tools must be a list.", param="tools")
    chat = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(cast("list[Any]", value))]
    if not chat:
        return []
    try:
        return check_tools(chat)
    except InvalidRequestError as error:  # it names chat's fields
        message, param = (
            text.replace(".function", "").replace(".parameters", ".input_schema")
            for text in (error.message, error.param or "tools")
        )
        raise InvalidRequestError(message, param=param) from None


def _chat_tool(tool: Any, path: str) -> dict[str, Any]:
    kind = cast("dict[str, Any]", tool).get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise UnsupportedError(
            f"{path}.type {repr(kind)[:100]} is not supported by this server: it takes custom tools only.",
            param=f"{path}.type",
        )
    fields = known_fields(
        tool,
        path,
        ("type", "name", "description", "input_schema", "strict"),
        {
            "allowed_callers": neutral(["direct"]),
            "defer_loading": neutral(False),
            "eager_input_streaming": lambda value: value is None or isinstance(value, bool),  # it always is
            "input_examples": neutral([]),
            **HINTS,
        },
    )
    if "input_schema" not in fields:
        raise InvalidRequestError(f"{path}.input_schema is missing.", param=f"{path}.input_schema")
    names = {
        "name": "name",
        "description": "description",
        "input_schema": "parameters",
        "strict": "strict",
    }
    function = {names[name]: value for name, value in fields.items() if name != "type"}
    return {"type": "function", "function": function}


def parse_tool_choice(value: Any) -> dict[str, Any]:
    """The choice, checked, as it was sent.

    Raises:
        InvalidRequestError: with the field's path.
    """
    fields = known_fields(value, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    kind = choice_field(fields, "type", "tool_choice", ("auto", "any", "tool", "none"))
    if kind == "tool":
        text_field(fields, "name", "tool_choice")
    if not isinstance(fields.get("disable_parallel_tool_use", False), bool):
        path = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequestError(f"{path} must be true or false.", param=path)
    return fields


# --- the bodies --------------------------------------------------------------------------------------------


class ThinkingConfig(Bounded):
    """Whether the model thinks before it answers."""

    model_config = STRICT

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=MIN_THINKING_BUDGET, le=2**63 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> ThinkingConfig:
        if (self.budget_tokens is None) is (self.type == "enabled"):
            problem = "is missing" if self.type == "enabled" else f"has no meaning with type {self.type!r}"
            raise InvalidRequestError(f"thinking.budget_tokens {problem}.", param="thinking.budget_tokens")
        return self


class JSONFormat(Bounded):
    """JSON that fits a schema."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Bounded):
    """The effort, and the form of the answer."""

    model_config = STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JSONFormat | None = None


class ConversationRequest(SamplingFieldsHere):
    """What a message and its token count have in common."""

    model_config = STRICT

    model: str | None = None
    messages: Annotated[
        list[dict[str, Any]], PlainValidator(parse_messages, json_schema_input_type=list[Message])
    ]
    system: (
        Annotated[str, PlainValidator(parse_system, json_schema_input_type=str | list[TextBlock])] | None
    ) = None
    tools: (
        Annotated[list[dict[str, Any]], PlainValidator(parse_tools, json_schema_input_type=list[Tool])] | None
    ) = None
    tool_choice: (
        Annotated[
            dict[str, Any],
            PlainValidator(parse_tool_choice, json_schema_input_type=ToolChoiceMode | NamedTool),
        ]
        | None
    ) = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Accepted: every prefix is cached, and the rest is the provider's bookkeeping.
    cache_control: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, body: Any) -> Any:
        return known_fields(body, "", cls.model_fields, UNSUPPORTED)

    @model_validator(mode="after")
    def _check_choice(self) -> ConversationRequest:
        resolve_choice(self.chat_tool_choice, self.tools)
        return self

    @property
    def chat_tool_choice(self) -> ToolChoice | None:
        """The choice as OpenAI's chat spells it."""
        choice = self.tool_choice
        if choice is None or (choice["type"] == "auto" and not self.tools):
            return None
        match choice["type"]:
            case "tool":
                return ToolChoice("required", named=choice["name"])
            case "any":
                return ToolChoice("required")
            case kind:
                return ToolChoice(kind)

    @property
    def show_thinking(self) -> bool:
        """Whether the answer has thinking blocks, if the model thinks."""
        config = self.thinking
        return config is None or (config.type != "disabled" and config.display != "omitted")

    def conversation(self, service: GenerationService) -> Conversation:
        """What the model is to answer; a last message of the assistant's is the beginning of the answer.

        Raises:
            UnsupportedError: thinking is asked of a model that can't.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        last = self.messages[-1]
        return Conversation(
            [*system, *self.messages],
            tools=self.tools,
            tool_choice=self.chat_tool_choice,
            parallel_tool_calls=not (self.tool_choice or {}).get("disable_parallel_tool_use", False),
            reasoning_effort=self.output_config.effort if self.output_config else None,
            thinking_token_budget=self.thinking.budget_tokens if self.thinking else None,
            continue_final_message=last["role"] == "assistant" and "tool_calls" not in last,
            template_kwargs={**self._thinking_kwargs(service), **(self.chat_template_kwargs or {})},
            names=NAMES,
        )

    def _thinking_kwargs(self, service: GenerationService) -> dict[str, bool]:
        """The template's switches for thinking; adaptive leaves them as they are."""
        if self.thinking is None or self.thinking.type == "adaptive":
            return {}
        wanted = self.thinking.type == "enabled"
        if wanted and service.parsers.names.reasoning is None:
            raise UnsupportedError(
                "thinking is enabled, but this model does not think (or --reasoning-parser none).",
                param="thinking",
            )
        return dict.fromkeys(thinking_switches(service), wanted)


class CountTokensRequest(ConversationRequest):
    """POST /v1/messages/count_tokens."""


class MessageRequest(ConversationRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**63 - 1)]
    stop_sequences: List[str] | None = None
    stream: bool | None = None

    # vLLM's
    priority: Int64 | None = None
    request_id: Identifier | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> MessageRequest:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise InvalidRequestError(
                f"thinking.budget_tokens is {budget}; it must be less than max_tokens ({self.max_tokens}).",
                param="thinking.budget_tokens",
            )
        return self

    def sampling_values(self) -> dict[str, Any]:
        """The sampling fields that the request sets."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS if name not in NOT_HERE}
        values["max_tokens"] = self.max_tokens
        values["stop"] = self.stop_sequences or None
        values["structured_outputs"] = self._constraint() or values.get("structured_outputs")
        return {name: value for name, value in values.items() if value is not None}

    def _constraint(self) -> StructuredOutputsParams | None:
        form = self.output_config.format if self.output_config else None
        return None if form is None else json_schema_output(form.schema_, param="output_config.format")

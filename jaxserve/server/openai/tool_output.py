"""OutputPlan: what tools and reasoning change about a request, for every endpoint that takes them.

From the request's fields to the prompt's variables, the sampling parameters, and a parser for each choice::

    plan = plan_output(service, body.messages, tools=body.tools, tool_choice=body.tool_choice, …)
    prompt = await chat_prompt(service, plan.messages, tools=plan.tools, kwargs=plan.template_kwargs, …)
    params = plan.sampling_params(params, prompt)
    parser = plan.parser(prompt, params)  # one per choice; see jaxserve.parsers
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.config import ServerConfig
from jaxserve.engine.protocol import EngineClient
from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.parsers import OutputParser, ParserSet
from jaxserve.parsers.interface import Schemas, ToolParser
from jaxserve.parsers.registry import AUTO, resolve
from jaxserve.parsers.tools.forced_json import ForcedArgumentsParser, ForcedCallsParser
from jaxserve.reasoning_params import ReasoningParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.beams import BeamSamplingParams
from jaxserve.server.generation import GenerationService
from jaxserve.server.openai.messages import text_of
from jaxserve.server.openai.tools import ToolChoice, calls_schema, resolve_choice, schemas_of
from jaxserve.structured_outputs_params import StructuredOutputsParams, json_schema_output
from jaxserve.tokenizer import chat_template
from jaxserve.tokenizer.prompted_tools import PROMPTED_PARSER, in_messages, takes_tools

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""


@dataclass(frozen=True)
class OutputPlan:
    """How a request is prompted, sampled and read.

    Args:
        messages: for the template.
        tools: for the template; None shows it none.
        template_kwargs: further variables of the template.
        choice: what holds of ``tool_choice``.
        schemas: what may be called; None leaves calls in the content.
    """

    parsers: ParserSet
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    choice: ToolChoice
    schemas: Schemas | None = None
    parallel_tool_calls: bool = True
    thinking_token_budget: int | None = None
    continued: str | None = None
    """The text that the answer goes on with; None begins a new message."""
    forced: StructuredOutputsParams | None = None
    """The grammar of calls that are required."""
    strict: StructuredOutputsParams | None = None
    """The grammar of an answer whose calls, if any, keep to the schemas: for ``strict`` tools."""

    def sampling_params(self, params: SamplingParams, prompt: str) -> SamplingParams:
        """``params``, with what the parsers need to see and the grammar of required calls.

        Args:
            params: as the request asks.
            prompt: rendered; whether it begins the reasoning decides where a grammar begins to hold.

        Raises:
            InvalidRequestError: the request asks for what these tools or this model rule out.
        """
        changes: dict[str, Any] = {}
        if self.forced is not None:
            _check_free(params)
            changes["structured_outputs"] = self.forced
        elif self.strict is not None and not _is_constrained(params):
            changes["structured_outputs"] = self.strict
        has_calls = self.schemas is not None and self.forced is None
        shown = self.parsers.shown_special_tokens(tools=has_calls)
        stops = self.parsers.stop_token_ids(tools=has_calls)
        if shown:
            changes["shown_special_tokens"] = shown
        if stops and not params.ignore_eos:
            changes["stop_token_ids"] = [*(params.stop_token_ids or ()), *stops]
        constrained = "structured_outputs" in changes or params.structured_outputs is not None
        if constrained or self.thinking_token_budget is not None:
            changes["reasoning"] = self._reasoning(params, prompt)
        return params.clone(**changes) if changes else params

    def parser(self, prompt: str, params: SamplingParams) -> OutputParser:
        """A parser for one choice.

        Args:
            prompt: rendered.
            params: what ``sampling_params`` returned for it.
        """
        # A grammar that holds from the first token on leaves no room for reasoning, unless it takes any text.
        reasons = params.structured_outputs in (None, self.strict) or params.reasoning is not None
        if self.forced is None:
            return self.parsers.create(
                self._begun(prompt),
                tools=self.schemas,
                parallel_tool_calls=self.parallel_tool_calls,
                reasoning=reasons,
            )
        kind: type[ToolParser] = ForcedCallsParser if self.choice.named is None else ForcedArgumentsParser
        return self.parsers.create(
            self._begun(prompt),
            tools=self.schemas,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning=reasons,
            tool_class=kind,
        )

    def _reasoning(self, params: SamplingParams, prompt: str) -> ReasoningParams | None:
        budget = self.thinking_token_budget
        if budget is None:
            return self.parsers.reasoning_params(self._begun(prompt))
        cls = self.parsers.reasoning_class
        if cls is None or not cls.budgets or not self.parsers.reasoning_end_ids:
            raise UnsupportedError(
                "thinking_token_budget is not supported with this model: no token is known that ends its reasoning.",
                param="thinking_token_budget",
            )
        if isinstance(params, BeamSamplingParams):
            raise UnsupportedError(
                "thinking_token_budget is not supported with use_beam_search.", param="thinking_token_budget"
            )
        return self.parsers.reasoning_params(self._begun(prompt), budget)

    def _begun(self, prompt: str) -> str:
        """The prompt as reasoning parsers look at it: its end says whether the reasoning has begun, or is over."""
        cls = self.parsers.reasoning_class
        if self.continued is None or cls is None:
            return prompt
        _, started, rest = self.continued.rpartition(cls.start) if cls.start else ("", "", "")
        return cls.start or "" if started and cls.end not in rest else cls.end


def _is_constrained(params: SamplingParams) -> bool:
    """Whether the request's own grammar, or a beam search, leaves no room for another grammar."""
    return params.structured_outputs is not None or isinstance(params, BeamSamplingParams)


def _check_free(params: SamplingParams) -> None:
    """Refuse what cannot stand beside a required call."""
    if params.structured_outputs is not None:
        raise InvalidRequestError(
            "tool_choice requires a call, and the request also constrains its output "
            f"({params.structured_outputs.param}): use one of them.",
            param="tool_choice",
        )
    if isinstance(params, BeamSamplingParams):
        raise UnsupportedError(
            "use_beam_search is not supported with a tool_choice that requires a call.",
            param="use_beam_search",
        )


def parsers_of(engine: EngineClient, config: ServerConfig, chat_template_text: str | None) -> ParserSet:
    """The parsers of a server, as its flags and its model say.

    A model whose template takes no tools gets them described in Hermes's form, and is read so.

    Raises:
        ConfigError: there is no parser of that name.
    """
    tokenizer = engine.tokenizer
    template = None
    if tokenizer is not None:
        with contextlib.suppress(InvalidRequestError):  # no template: no chat, but completions
            template = chat_template.template_text(tokenizer, chat_template_text, has_tools=True)
    tool_call_parser = config.tool_call_parser
    if tool_call_parser == AUTO and template is not None and not takes_tools(template):
        tool_call_parser = PROMPTED_PARSER
    return resolve(
        tool_call_parser,
        config.reasoning_parser,
        chat_template=template,
        tokenizer=tokenizer,
        model_type=engine.model_type,
    )


def plan_output(
    service: GenerationService,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: ToolChoice | None = None,
    parallel_tool_calls: bool | None = None,
    reasoning_effort: str | None = None,
    thinking_token_budget: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    template: str | None = None,
    continue_final_message: bool = False,
) -> OutputPlan:
    """The plan of a request.

    Args:
        service: the server's model, template and parsers.
        messages: checked (``check_messages``).
        tools: checked (``check_tools``), in the form of chat completions.
        tool_choice: checked (``check_tool_choice``); None is ``auto`` with tools, ``none`` without.
        parallel_tool_calls: False allows one call.
        reasoning_effort: one of EFFORTS.
        thinking_token_budget: tokens of reasoning at most; None or -1 is no limit.
        template_kwargs: the request's own variables for the template; they win.
        template: the request's own template, where the server takes one.
        continue_final_message: the answer goes on with the last message.

    Raises:
        InvalidRequestError: naming the parameter.
    """
    choice = resolve_choice(tool_choice, tools)
    template = chat_template.template_text(
        service.tokenizer, template or service.chat_template, has_tools=bool(tools)
    )
    kwargs = {**_effort_kwargs(template, reasoning_effort), **(template_kwargs or {})}
    plan = OutputPlan(
        service.parsers,
        messages,
        tools,
        kwargs,
        choice,
        parallel_tool_calls=parallel_tool_calls is not False,
        thinking_token_budget=_budget(thinking_token_budget),
        continued=text_of(messages[-1]) if continue_final_message else None,
    )
    if not takes_tools(template):
        described = tools if choice.mode != "none" else None
        plan = replace(plan, tools=None, messages=in_messages(messages, described))
        if described and plan.parsers.names.tool not in (None, PROMPTED_PARSER):
            raise UnsupportedError(
                "The model's chat template does not take tools: give one that does with --chat-template, or leave "
                "the choice of the parser to the server (--tool-call-parser auto).",
                param="tools",
            )
    if not tools or choice.mode == "none":
        return plan
    return _with_tools(service, plan, tools)


def _with_tools(
    service: GenerationService, plan: OutputPlan, tools: Sequence[Mapping[str, Any]]
) -> OutputPlan:
    """The plan of a request whose answer may hold calls."""
    schemas = schemas_of(tools, plan.choice)
    forced: StructuredOutputsParams | None = None
    if plan.choice.named is not None:
        forced = json_schema_output(dict(schemas[plan.choice.named]), param="tools")
    elif plan.choice.mode == "required":
        forced = json_schema_output(calls_schema(schemas, parallel=plan.parallel_tool_calls), param="tools")
    elif not service.auto_tool_choice:
        raise UnsupportedError(
            "tool_choice auto is switched off on this server (--no-enable-auto-tool-choice).",
            param="tool_choice",
        )
    elif plan.parsers.names.tool is None:
        raise UnsupportedError(
            "This server has no parser for the model's tool calls: name one with --tool-call-parser, or use "
            "tool_choice 'required' or a named function.",
            param="tools",
        )
    strict = strict_calls(plan, tools, schemas) if forced is None else None
    return replace(plan, schemas=schemas, forced=forced, strict=strict)


def strict_calls(
    plan: OutputPlan, tools: Sequence[Mapping[str, Any]], schemas: Schemas
) -> StructuredOutputsParams | None:
    """Free text in which calls keep to the schemas of strict tools; None without such tools, or where the model's
    syntax has no form for it."""
    strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict")} & set(schemas)
    if not strict or plan.parsers.tool_class is None:
        return None
    tags: list[dict[str, Any]] = []
    triggers: set[str] = set()
    for name, schema in schemas.items():
        tag = plan.parsers.tool_class.call_tag(name)
        if tag is None:
            return None
        content = {"type": "json_schema", "json_schema": schema if name in strict else {"type": "object"}}
        tags.append({"type": "tag", "begin": tag.begin, "content": content, "end": tag.end})
        triggers.add(tag.trigger)
    form: dict[str, Any] = {"type": "triggered_tags", "triggers": sorted(triggers), "tags": tags}
    if not plan.parallel_tool_calls:
        form["stop_after_first"] = True
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form}, param="tools")


def _budget(value: int | None) -> int | None:
    if value is None or value == -1:
        return None
    if value < 0:
        raise InvalidRequestError(
            f"thinking_token_budget is {value}; it must be 0 or more, or -1 for no limit.",
            param="thinking_token_budget",
        )
    return value


def _effort_kwargs(template: str, effort: str | None) -> dict[str, Any]:
    """The template's variables for a reasoning effort.

    Raises:
        UnsupportedError: the template has none: the effort would be ignored.
    """
    if effort is None:
        return {}
    names = chat_template.variables(template)
    kwargs: dict[str, Any] = {name: effort != "none" for name in THINKING_SWITCHES if name in names}
    if "reasoning_effort" in names:
        kwargs["reasoning_effort"] = effort
    if not kwargs:
        raise UnsupportedError(
            f"reasoning_effort is {effort!r}, but the model's chat template has no setting for it; remove it.",
            param="reasoning_effort",
        )
    return kwargs

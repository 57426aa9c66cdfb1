"""Which parsers there are, and which ones a model gets. A parser's file is imported when it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from jaxserve.errors import ConfigError
from jaxserve.parsers.interface import ReasoningParser, Schemas, StreamParser, ToolParser
from jaxserve.parsers.output_parser import OutputParser
from jaxserve.reasoning_params import ReasoningParams
from jaxserve.tokenizer.interface import Tokenizer

TOOL_PARSERS: Mapping[str, str] = {
    "deepseek_v3": "deepseek_v3:DeepSeekV3Parser",
    "deepseek_v31": "deepseek_v3:DeepSeekV3Parser",
    "gemma": "gemma:GemmaParser",
    "gpt_oss": "gpt_oss:HarmonyParser",
    "granite": "granite:GraniteParser",
    "hermes": "hermes:HermesParser",
    "llama3_json": "llama3_json:Llama3JsonParser",
    "llama4_pythonic": "llama4_pythonic:PythonicParser",
    "mistral": "mistral:MistralParser",
    "phi4": "phi4:Phi4Parser",
    "qwen3_coder": "qwen3_coder:Qwen3CoderParser",
}
"""Name to file and class in ``tools/``."""
TOOL_ALIASES = {
    "functiongemma": "gemma",
    "openai": "gpt_oss",
    "phi4_mini_json": "phi4",
    "pythonic": "llama4_pythonic",
    "qwen3_xml": "qwen3_coder",
}
"""Names by which vLLM's users know them."""
REASONING_PARSERS: Mapping[str, str] = {
    "deepseek_r1": "deepseek_r1:DeepSeekR1Parser",
    "gpt_oss": "gpt_oss:HarmonyReasoningParser",
    "granite": "granite:GraniteReasoningParser",
    "mistral": "mistral:MistralReasoningParser",
    "qwen3": "qwen3:Qwen3ReasoningParser",
}
"""Name to file and class in ``reasoning/``."""
REASONING_ALIASES = {"openai_gptoss": "gpt_oss"}
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ParserNames:
    """The parsers of a model by name; None has none."""

    tool: str | None = None
    reasoning: str | None = None


def choose(chat_template: str | None, tokenizer: Tokenizer | None, model_type: str | None) -> ParserNames:
    """The parsers that fit a model, as its template, its special tokens and its type show.

    Args:
        chat_template: the template's text: it holds the tags of the syntax that the model was trained on.
        tokenizer: may have tags as tokens that the template does not mention.
        model_type: of ``config.json``, such as ``qwen3``; the architecture of a GGUF file.
    """
    marks = _Marks(chat_template or "", tokenizer, (model_type or "").lower().replace("-", "_"))
    return ParserNames(_choose_tool(marks), _choose_reasoning(marks))


class ParserSet:
    """A served model's parsers.

    Args:
        names: which ones; ``ParserNames.tool`` and ``reasoning`` may be aliases.
        tokenizer: finds the ids of the special tokens that a syntax is made of.

    Raises:
        ConfigError: there is no parser of that name.
    """

    def __init__(self, names: ParserNames, tokenizer: Tokenizer | None) -> None:
        self.names = ParserNames(
            _known("tool_call_parser", names.tool, TOOL_PARSERS, TOOL_ALIASES),
            _known("reasoning_parser", names.reasoning, REASONING_PARSERS, REASONING_ALIASES),
        )
        self._tokenizer = tokenizer

    @cached_property
    def tool_class(self) -> type[ToolParser] | None:
        name = self.names.tool
        return None if name is None else _load("tools", TOOL_PARSERS[name])

    @cached_property
    def reasoning_class(self) -> type[ReasoningParser] | None:
        name = self.names.reasoning
        return None if name is None else _load("reasoning", REASONING_PARSERS[name])

    def shown_special_tokens(self, *, tools: bool) -> list[int]:
        """Ids of the special tokens that must stay in the text to be parsed.

        Args:
            tools: whether calls are to be found, too.
        """
        return self._shown[tools]

    def stop_token_ids(self, *, tools: bool) -> list[int]:
        """Ids that end an output beside the model's own."""
        return self._stops[tools]

    # Of a request without tools, and of one with them: worked out once, tokenizing takes a while.

    @cached_property
    def _shown(self) -> list[list[int]]:
        return [self._ids(*(c.special_tokens for c in self._classes(tools))) for tools in (False, True)]

    @cached_property
    def _stops(self) -> list[list[int]]:
        return [self._ids(*(c.stop_tokens for c in self._classes(tools))) for tools in (False, True)]

    def create(
        self,
        prompt: str = "",
        *,
        tools: Schemas | None = None,
        parallel_tool_calls: bool = True,
        reasoning: bool = True,
        tool_class: type[ToolParser] | None = None,
    ) -> OutputParser:
        """A parser for one choice.

        Args:
            prompt: the rendered prompt, whose end may begin the reasoning.
            tools: the names and schemas of what may be called; None leaves calls in the content.
            parallel_tool_calls: False keeps the first call alone.
            reasoning: whether the output may hold reasoning.
            tool_class: finds the calls instead of the model's own parser.
        """
        reasoner = self.reasoning_class(prompt) if reasoning and self.reasoning_class is not None else None
        tool_class = tool_class or self.tool_class
        tool = tool_class(tools) if tools is not None and tool_class is not None else None
        return OutputParser(
            reasoner, tool, parallel_tool_calls=parallel_tool_calls, end_token_ids=self.reasoning_end_ids
        )

    @cached_property
    def reasoning_end_ids(self) -> list[int]:
        """The tokens that end the reasoning; empty where a text may be spelt by different ones."""
        if self.reasoning_class is None or self._tokenizer is None:
            return []
        ids = spelling(self._tokenizer, self.reasoning_class.end)
        return ids if len(ids) == 1 or self.reasoning_class.tokens else []

    def reasoning_params(self, prompt: str, budget: int | None = None) -> ReasoningParams | None:
        """Where the reasoning of an answer to ``prompt`` begins and ends; None if that is not known in tokens, or
        there is none.

        Args:
            prompt: the rendered prompt.
            budget: tokens of reasoning at most.
        """
        if self.reasoning_class is None or self._tokenizer is None or not self.reasoning_end_ids:
            return None
        begins = self.reasoning_class(prompt).begins
        start_ids: list[int] = []
        if begins == "either" and self.reasoning_class.start is not None:
            start_ids = spelling(self._tokenizer, self.reasoning_class.start)
        if begins == "answer" or (begins == "either" and len(start_ids) != 1):
            return None
        return ReasoningParams(
            end_token_ids=self.reasoning_end_ids, start_token_id=next(iter(start_ids), None), budget=budget
        )

    def _classes(self, tools: bool) -> list[type[StreamParser]]:
        classes = [self.reasoning_class, self.tool_class if tools else None]
        return [cls for cls in classes if cls is not None]

    def _ids(self, *names: tuple[str, ...]) -> list[int]:
        if self._tokenizer is None:
            return []
        ids = [special_token_id(self._tokenizer, token) for tokens in names for token in tokens]
        return sorted({token_id for token_id in ids if token_id is not None})


def check_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Look the flags' values up, before anything is loaded.

    Raises:
        ConfigError: there is no parser of that name.
    """
    flags = (tool_call_parser, reasoning_parser)
    ParserSet(ParserNames(*(None if flag == AUTO else flag for flag in flags)), None)


def special_token_id(tokenizer: Tokenizer, token: str) -> int | None:
    """The id of a special token; None if the tokenizer has no special token of that text."""
    ids = spelling(tokenizer, token)
    return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_token_ids else None


def spelling(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens that spell ``text``; none if the tokenizer does not know all of it (and writes "unknown")."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if "".join(tokenizer.convert_ids_to_tokens(ids)) == text else []


def _known(param: str, name: str | None, parsers: Mapping[str, str], aliases: dict[str, str]) -> str | None:
    if name is None or name == NONE:
        return None
    resolved = aliases.get(name, name)
    if resolved not in parsers:
        names = ", ".join(sorted({*parsers, *aliases}))
        raise ConfigError(f"{param} is {name!r}; it must be one of auto, none, {names}.", param=param)
    return resolved


def _load(room: str, place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"jaxserve.parsers.{room}.{module}"), name)


# --- which one fits ----------------------------------------------------------------------------------------


class _Marks:
    """What is known of a model: the text of its template, its special tokens, its type."""

    def __init__(self, template: str, tokenizer: Tokenizer | None, model_type: str) -> None:
        self.template = template
        self.model_type = model_type
        self._tokenizer = tokenizer

    def writes(self, *texts: str) -> bool:
        """Whether the template holds one of ``texts``."""
        return any(text in self.template for text in texts)

    def is_type(self, *prefixes: str) -> bool:
        return self.model_type.startswith(prefixes)

    def has_token(self, token: str) -> bool:
        """Whether ``token`` is a single token."""
        return self._tokenizer is not None and len(spelling(self._tokenizer, token)) == 1


def _choose_tool(marks: _Marks) -> str | None:
    """The syntax whose tags the template writes; by the model's type where several write the same."""
    if marks.writes("<|channel|>") or marks.has_token("<|channel|>") or marks.is_type("gpt_oss"):
        return "gpt_oss"
    if marks.writes("<function="):
        return "qwen3_coder"
    if marks.writes("<|tool_call|>"):
        return "phi4" if marks.is_type("phi") or marks.writes("<|tool|>") else "granite"
    if marks.writes("<tool_call>"):
        return "hermes"
    if marks.writes("[TOOL_CALLS]") or marks.is_type("mistral", "mixtral", "ministral"):
        return "mistral"
    if marks.writes("<｜tool▁call") or marks.is_type("deepseek_v3"):
        return "deepseek_v3"
    if marks.writes("<|python_start|>") or marks.is_type("llama4"):
        return "llama4_pythonic"
    if marks.writes("<start_function_call>"):
        return "gemma"
    if marks.writes("<|python_tag|>") or (marks.writes('"parameters":') and marks.is_type("llama", "mllama")):
        return "llama3_json"
    if marks.writes("functools[", "<|tool|>"):
        return "phi4"
    return _choose_tool_by_type(marks)


def _choose_tool_by_type(marks: _Marks) -> str | None:
    types = {"qwen": "hermes", "granite": "granite", "phi4": "phi4"}
    return next((name for prefix, name in types.items() if marks.is_type(prefix)), None)


def _choose_reasoning(marks: _Marks) -> str | None:
    if marks.writes("<|channel|>") or marks.has_token("<|channel|>") or marks.is_type("gpt_oss"):
        return "gpt_oss"
    if marks.writes("[THINK]") or marks.has_token("[THINK]"):
        return "mistral"
    if marks.writes("Here is my thought process"):
        return "granite"
    if not marks.writes("<think>", "</think>"):
        return None
    return "qwen3" if marks.writes("enable_thinking") or marks.is_type("qwen3") else "deepseek_r1"


def resolve(
    tool_call_parser: str,
    reasoning_parser: str,
    *,
    chat_template: str | None,
    tokenizer: Tokenizer | None,
    model_type: str | None,
) -> ParserSet:
    """The parsers that the flags ask for; ``auto`` chooses by the model."""
    chosen = choose(chat_template, tokenizer, model_type)
    names = ParserNames(
        chosen.tool if tool_call_parser == AUTO else tool_call_parser,
        chosen.reasoning if reasoning_parser == AUTO else reasoning_parser,
    )
    return ParserSet(cast(Any, names), tokenizer)

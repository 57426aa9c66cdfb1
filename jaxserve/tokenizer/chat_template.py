"""Render a chat template: messages to the prompt's text, as transformers' ``apply_chat_template`` does.

A template that is broken, refuses the messages, or exceeds its limits is the request's error.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2 import meta, nodes

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.tokenizer.interface import Tokenizer
from jaxserve.tokenizer.template_environment import TemplateEnvironment, TemplateLimitError

MAX_SECONDS = 5.0
"""Rendering time of one conversation."""
MAX_TEMPLATE_CHARACTERS = 1 << 17
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that hold text, by OpenAI's names."""
RESERVED_KWARGS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize")
"""Names that ``chat_template_kwargs`` may not set: each is a parameter of its own."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_END = "<|the final message ends here: 61fd3a|> "
"""Put at the end of a message that is to be continued, to find its end in the rendered text."""


def render(
    tokenizer: Tokenizer | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    max_seconds: float = MAX_SECONDS,
) -> str:
    """The prompt of a conversation. Blocks while it works (rarely more than a few milliseconds).

    Args:
        tokenizer: brings the template (``tool_use`` among several if there are tools) and the special tokens.
        messages: in OpenAI's form; fields that are None are left out. Text parts are joined by newlines,
            unless the template takes lists. Arguments of tool calls, JSON in OpenAI's form, become objects,
            unless the template takes text.
        chat_template: the template's text, or the name of one of the tokenizer's; None takes its default.
        add_generation_prompt: end with what begins the assistant's answer; ignored with
            ``continue_final_message``.
        continue_final_message: end within the last message, so that the model goes on with it.
        tools: JSON schemas of tools.
        documents: for retrieval templates.
        kwargs: further variables of the template.
        max_seconds: when to give up.

    Raises:
        InvalidRequestError: naming ``messages``, ``chat_template``, ``tools``, ``documents`` or
            ``chat_template_kwargs``.
    """
    text = _choose_template(tokenizer, chat_template, bool(tools))
    template, style = _compile(text)
    conversation = [_prepare(message, index, style) for index, message in enumerate(_as_list(messages))]
    if continue_final_message:
        _mark_end(conversation)
    variables: dict[str, Any] = {} if tokenizer is None else dict(tokenizer.special_tokens_map)
    variables |= _check_kwargs(kwargs)
    variables |= {
        "messages": conversation,
        "tools": _plain_list(tools, "tools"),
        "documents": _plain_list(documents, "documents"),
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
    }
    rendered = _render(template, variables, max_seconds)
    return _cut_at_end(rendered) if continue_final_message else rendered


def content_format(chat_template: str) -> str:
    """How the template takes a message's content: ``string`` or ``openai`` (a list of parts).

    Raises:
        InvalidRequestError: the template does not compile.
    """
    return "openai" if _compile(chat_template)[1].takes_lists else "string"


def template_text(tokenizer: Tokenizer | None, chat_template: str | None, *, has_tools: bool) -> str:
    """The template that ``render`` would take.

    Raises:
        InvalidRequestError: there is none.
    """
    return _choose_template(tokenizer, chat_template, has_tools)


def variables(chat_template: str) -> frozenset[str]:
    """What a template reads: names that it does not set itself, such as ``tools`` or ``enable_thinking``.

    Raises:
        InvalidRequestError: the template does not compile.
    """
    return _compile(chat_template)[1].variables


# --- the template ------------------------------------------------------------------------------------------


class _Style:
    """What a template does with contents, as its syntax tree shows.

    A template that loops over a message's content takes lists of parts; one that also tests for strings takes
    both.
    """

    def __init__(self, tree: nodes.Template) -> None:
        names = {
            node.target.name
            for node in tree.find_all(nodes.Assign)
            if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
        }
        loops = (node.iter for node in tree.find_all(nodes.For))
        self.takes_lists = any(_is_content(iterated, names) for iterated in loops)
        self.takes_strings = not self.takes_lists or any(
            node.name == "string" for node in tree.find_all(nodes.Test)
        )
        self.tests_for_none = any(
            node.name == "none" and _is_content(node.node, names) for node in tree.find_all(nodes.Test)
        )
        self.takes_argument_text = any(
            _is_arguments(operand)
            for kind in (nodes.Add, nodes.Concat)
            for node in tree.find_all(kind)
            for operand in node.iter_child_nodes()
        )
        self.variables = frozenset(meta.find_undeclared_variables(tree))


def _is_content(node: nodes.Node | None, names: frozenset[str] | set[str]) -> bool:
    """Whether an expression is a message's content, maybe filtered or conditional."""
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _is_arguments(node: nodes.Node) -> bool:
    """Whether an expression is a call's arguments, unfiltered: then they must be text."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "arguments"
    return isinstance(node, nodes.Getitem) and (
        isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"
    )


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@functools.lru_cache(maxsize=64)
def _compile(text: str) -> tuple[jinja2.Template, _Style]:
    if len(text) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidRequestError(
            f"chat_template has {len(text)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed.",
            param="chat_template",
        )
    try:
        environment = _environment()
        return environment.compile_template(text), _Style(environment.parse(text))
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" (line {line})"
        raise InvalidRequestError(
            f"chat_template is not a valid Jinja template{where}: {error.message}", param="chat_template"
        ) from error
    except (RecursionError, SyntaxError, MemoryError, OverflowError) as error:
        raise InvalidRequestError(
            f"chat_template cannot be compiled: {type(error).__name__}.", param="chat_template"
        ) from error


def _choose_template(tokenizer: Tokenizer | None, chat_template: str | None, has_tools: bool) -> str:
    named: dict[str, str] = getattr(tokenizer, "chat_templates", {})
    if chat_template is not None:
        return named.get(chat_template, chat_template)
    if has_tools and "tool_use" in named:
        return named["tool_use"]
    text = None if tokenizer is None else tokenizer.chat_template
    if text is None:
        extra = f" (its named ones are {', '.join(sorted(named))})" if named else ""
        raise InvalidRequestError(
            f"The model's tokenizer has no chat template{extra}: give one with --chat-template, or use "
            "completions instead of chat.",
            param="messages",
        )
    return text


def _render(template: jinja2.Template, variables: dict[str, Any], max_seconds: float) -> str:
    try:
        return _environment().render_limited(template, variables, max_seconds)
    except TemplateLimitError as error:
        raise InvalidRequestError(
            f"The chat template was stopped: {error.message}.", param="chat_template"
        ) from error
    except jinja2.TemplateError as error:
        # What a template raises about the messages (raise_exception), or what it misses in them.
        raise InvalidRequestError(
            f"The chat template refuses these messages: {error.message}", param="messages"
        ) from error
    except RecursionError as error:
        raise InvalidRequestError(
            "The chat template was stopped: it calls itself too deeply.", param="chat_template"
        ) from error
    except Exception as error:  # a template can raise whatever Python's operators and methods raise
        raise InvalidRequestError(
            f"The chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
        ) from error


# --- messages ----------------------------------------------------------------------------------------------


def _as_list(messages: Any) -> list[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            f"messages must be a list, got {type(messages).__name__}.", param="messages"
        )
    if not messages:
        raise InvalidRequestError("messages is empty; at least one message is needed.", param="messages")
    return list(cast("Sequence[Any]", messages))


def _prepare(message: Any, index: int, style: _Style) -> dict[str, Any]:
    """A message of plain data, its content and tool calls in the form that templates expect."""
    path = f"messages[{index}]"
    plain = _plain(message, path)
    if not isinstance(plain, dict):
        raise InvalidRequestError(
            f"{path} must be an object, got {type(message).__name__}.", param="messages"
        )
    fields = {name: value for name, value in cast("dict[str, Any]", plain).items() if value is not None}
    if not isinstance(fields.get("role"), str):
        raise InvalidRequestError(f"{path}.role must be a string.", param="messages")
    if "content" in fields:
        fields["content"] = _prepare_content(fields["content"], f"{path}.content", style)
    calls = _tool_calls(fields, path)
    for position, call in enumerate(calls):
        _parse_arguments(call, f"{path}.tool_calls[{position}]", style)
    if calls and style.tests_for_none and fields.get("content") in ("", []):
        fields["content"] = None
    reasoning = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _prepare_content(content: Any, path: str, style: _Style) -> Any:
    if isinstance(content, str):
        return content if style.takes_strings else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{path} must be a string or a list of parts, got {type(content).__name__}.", param="messages"
        )
    parts = cast("list[Any]", content)
    texts = [_part_text(part, f"{path}[{index}]") for index, part in enumerate(parts)]
    if style.takes_lists:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{path} must be an object, got {type(part).__name__}.", param="messages")
    fields = cast("dict[str, Any]", part)
    kind = fields.get("type")
    if kind not in TEXT_PARTS:
        raise UnsupportedError(
            f"{path} has the type {kind!r:.80}; only text parts are supported.", param="messages"
        )
    text = fields.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{path}.text must be a string.", param="messages")
    return text


def _tool_calls(fields: dict[str, Any], path: str) -> list[Any]:
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{path}.tool_calls must be a list.", param="messages")
    return cast("list[Any]", calls)


def _parse_arguments(call: Any, path: str, style: _Style) -> None:
    """OpenAI sends a call's arguments as JSON text; most templates write them with ``tojson``."""
    function = cast("dict[str, Any]", call).get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return
    fields = cast("dict[str, Any]", function)
    arguments = fields.get("arguments")
    if isinstance(arguments, dict) and style.takes_argument_text:
        fields["arguments"] = json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, dict) and style.takes_argument_text:
        fields["arguments"] = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        return
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"{path}.function.arguments is not valid JSON: {error}", param="messages"
        ) from error
    fields["arguments"] = (arguments.strip() or "{}") if style.takes_argument_text else parsed


# --- the final message -------------------------------------------------------------------------------------


def _mark_end(conversation: list[dict[str, Any]]) -> None:
    last = conversation[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _END
        return
    if isinstance(content, list) and content:
        part = cast("dict[str, str]", content[-1])
        part["text"] += _END
        return
    raise InvalidRequestError(
        "continue_final_message is set, but the last message has no text to continue.", param="messages"
    )


def _cut_at_end(rendered: str) -> str:
    """The text up to the end of the final message, trimmed where the template trims messages."""
    end = rendered.rfind(_END.rstrip())
    if end < 0:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template drops or changes the last message.",
            param="continue_final_message",
        )
    # A template may show the message earlier, too.
    text = rendered[:end].replace(_END, "").replace(_END.rstrip(), "")
    return text if rendered.startswith(_END, end) else text.rstrip()


# --- plain data --------------------------------------------------------------------------------------------


def _check_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    if kwargs is None:
        return {}
    reserved = [name for name in RESERVED_KWARGS if name in kwargs]
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs may not set {', '.join(reserved)}: use the parameter of that name.",
            param="chat_template_kwargs",
        )
    return cast("dict[str, Any]", _plain(kwargs, "chat_template_kwargs"))


def _plain_list(values: Any, name: str) -> list[Any] | None:
    if values is None:
        return None
    plain = _plain(values, name)
    if not isinstance(plain, list) or not all(isinstance(item, dict) for item in cast("list[Any]", plain)):
        raise InvalidRequestError(f"{name} must be a list of objects.", param=name)
    return cast("list[Any]", plain)


def _plain(value: Any, path: str) -> Any:
    """A copy made of JSON's types alone: a template sees no other objects, and cannot change the caller's.

    Objects with ``model_dump`` (those of OpenAI's client) become dictionaries.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {str(key): _plain(item, f"{path}.{key}") for key, item in items.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(cast("Sequence[Any]", value))]
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump(), path)
    for kind in (str, bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    name = path.split(".")[0].split("[")[0]
    raise InvalidRequestError(
        f"{path} must be text, a number, a list or an object, got {type(value).__name__}.", param=name
    )

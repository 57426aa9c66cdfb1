"""The Jinja environment of chat templates: transformers' dialect, sandboxed, with limits on time and size.

A template comes from a checkpoint, or from a client where the operator allows that. The sandbox keeps it from
reaching Python; the limits keep it from holding up the server. Every loop iteration, call, filter and
operator passes a checkpoint that looks at the clock, and what could make a huge value in one step (repeating,
padding, replacing, joining) is measured first. So no thread has to be watched, and nothing is left running
afterwards.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 1 << 24
"""Characters of the result, and of any string made on the way."""
MAX_ITEMS = 1 << 20
"""Items of any list made on the way."""
MAX_BITS = 4096
"""Bits of any integer made on the way."""
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-#0 +^_]*(\*|\d{5}|\d*\.(\*|\d{5}))")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{5}|\{)")
"""Format strings whose width or precision is five digits or more, or not constant."""


class TemplateLimitError(jinja2.TemplateError):
    """A template took too long or made something too large."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders chat templates. Safe to share between threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=_check_value,
            cache_size=0,
        )
        self._clock = _Clock()
        self.filters["tojson"] = self._to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._limited(name, function)
        variables = cast("dict[str, Any]", self.globals)
        del variables["lipsum"]
        variables["raise_exception"] = _raise_exception
        variables["strftime_now"] = _strftime_now
        variables["dict"] = _TemplateDict()
        variables["namespace"] = _TemplateNamespace

    def compile_template(self, text: str) -> jinja2.Template:
        """A template with checkpoints in all loops and macros.

        Raises:
            jinja2.TemplateSyntaxError: the text is not a template.
        """
        tree = self.parse(text)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            call = nodes.Call(nodes.EnvironmentAttribute("checkpoint"), [], [], None, None)
            cast("nodes.For", node).body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        for node in list(tree.find_all(nodes.Concat)):
            # ``a ~ b`` has no hook of its own: a filter looks at what it made.
            node.nodes = [_filtered(nodes.Concat(node.nodes), "string", node.lineno)]
        for node in tree.find_all(nodes.AssignBlock):
            node.filter = _filtered(node.filter, "string", node.lineno)
        tree.set_environment(self)
        return self.from_string(tree)

    def render_limited(self, template: jinja2.Template, variables: Mapping[str, Any], seconds: float) -> str:
        """Render within the limits.

        Raises:
            TemplateLimitError: it took longer than ``seconds``, or made too large a value.
            jinja2.TemplateError: the template's own errors.
        """
        self._clock.deadline = time.monotonic() + seconds
        try:
            parts: list[str] = []
            size = 0
            for part in template.generate(**variables):
                self.checkpoint()
                size += len(part)
                _check_characters(size)
                parts.append(part)
            return "".join(parts)
        finally:
            self._clock.deadline = None

    def checkpoint(self) -> None:
        """End the rendering in this thread if its time is up."""
        deadline = self._clock.deadline
        if deadline is not None and time.monotonic() > deadline:
            raise TemplateLimitError("it took too long to render")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.checkpoint()
        _measure_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.checkpoint()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str) and method.__name__ in _METHOD_SIZES:
            _check_characters(_METHOD_SIZES[method.__name__](owner, *args, **kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            _check_characters(len(result))
        return result

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with a checkpoint; what it makes is measured, before that where it could be huge."""
        measure = _FILTER_SIZES.get(name)
        passed = getattr(function, "jinja_pass_arg", None)

        def limited(*args: Any, **kwargs: Any) -> Any:
            self.checkpoint()
            if measure is not None:
                _check_characters(measure(*(args[1:] if passed else args), **kwargs))
            result = function(*args, **kwargs)
            if isinstance(result, str):
                _check_characters(len(result))
            return result

        if passed is not None:
            cast(Any, limited).jinja_pass_arg = passed
        return limited

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as transformers writes it: unlike Jinja's own filter it does not escape HTML."""
        if isinstance(indent, int) and indent > 1000:
            raise TemplateLimitError(f"it indents by {indent}")
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        parts: list[str] = []
        size = 0
        for part in encoder.iterencode(value):
            self.checkpoint()
            size += len(part)
            _check_characters(size)
            parts.append(part)
        return "".join(parts)


class _Clock(threading.local):
    """When the rendering in this thread must have ended, in seconds of ``time.monotonic()``."""

    deadline: float | None = None


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Expr | None, name: str, lineno: int) -> nodes.Filter:
    return cast("nodes.Filter", nodes.Filter(node, name, [], [], None, None).set_lineno(lineno))


# --- what templates may use --------------------------------------------------------------------------------


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    _percent_size(format)
    return datetime.now().strftime(format)


class _TemplateDict:
    """``dict(a=1)`` without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _TemplateNamespace(Namespace):
    """``namespace()`` whose attributes cannot shadow Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes: dict[Any, Any] = dict(*args, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")


# --- sizes -------------------------------------------------------------------------------------------------


def _check_characters(count: float) -> None:
    if count > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_CHARACTERS} characters")


def _check_items(count: float) -> None:
    if count > MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of more than {MAX_ITEMS} items")


def _check_value(value: Any) -> Any:
    """Every value that is printed comes by: a list that holds another many times over prints endlessly."""
    if not isinstance(value, (dict, list, tuple)):
        return value
    count = 0
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(cast("dict[Any, Any]", item).values())
        elif isinstance(item, (list, tuple)):
            stack.extend(cast("list[Any]", item))
        count += 1
        _check_items(count + len(stack))
    return value


def _measure_binop(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        _check_sum(left, right)
    elif operator == "*":
        _check_product(left, right)
        _check_product(right, left)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)
    elif operator == "%" and isinstance(left, str):
        _percent_size(left)


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        _check_characters(len(left) + len(right))
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        _check_items(len(cast("list[Any]", left)) + len(cast("list[Any]", right)))


def _check_product(value: Any, times: Any) -> None:
    if not isinstance(times, int):
        return
    if isinstance(value, str):
        _check_characters(len(value) * times)
    elif isinstance(value, (list, tuple)):
        _check_items(len(cast("list[Any]", value)) * times)
    elif isinstance(value, int):
        _check_bits(value.bit_length() + times.bit_length())


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_BITS} bits")


def _percent_size(text: Any, *_args: Any, **_kwargs: Any) -> int:
    """Refuse widths such as ``%999999999d``: no chat template pads that far."""
    return _refuse_wide(_WIDE_PERCENT, text)


def _braces_size(text: Any, *_args: Any, **_kwargs: Any) -> int:
    """Refuse widths such as ``{:999999999}`` and ``{:{}}``."""
    return _refuse_wide(_WIDE_BRACES, text)


def _refuse_wide(pattern: re.Pattern[str], text: Any) -> int:
    if pattern.search(str(text)):
        raise TemplateLimitError("it formats with a width that is too large or not constant")
    return 0


def _width_size(text: Any, width: Any = 0, *_args: Any, **_kwargs: Any) -> int:
    return max(_length(text), width if isinstance(width, int) else 0)


def _replace_size(text: Any, old: Any, new: Any, *_args: Any, **_kwargs: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old) if old else len(text) + 1
    return len(text) + times * max(0, len(new) - len(old))


def _tabs_size(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * max(0, tabsize)


def _join_size(separator: str, items: Any) -> int:
    return _filter_join_size(items, separator)


def _filter_join_size(items: Any, d: Any = "", *_args: Any, **_kwargs: Any) -> int:
    if not isinstance(items, (list, tuple)):
        return 0
    parts = cast("list[Any]", items)
    return sum(map(_length, parts)) + _length(d) * len(parts)


def _indent_size(text: Any, width: Any = 4, *_args: Any, **_kwargs: Any) -> int:
    lines = text.count("\n") + 1 if isinstance(text, str) else 1
    return _length(text) + lines * (width if isinstance(width, int) else _length(width))


def _wordwrap_size(
    text: Any, width: Any = 79, _break: Any = True, wrapstring: Any = None, *_args: Any
) -> int:
    return _length(text) * (1 + _length(wrapstring))


def _count_size(_value: Any, count: Any = 0, *_args: Any, **_kwargs: Any) -> int:
    if isinstance(count, int):
        _check_items(count)
    return 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": _width_size, "ljust": _width_size, "rjust": _width_size, "zfill": _width_size,
    "expandtabs": _tabs_size, "replace": _replace_size, "format": _braces_size, "format_map": _braces_size,
    "join": _join_size,
}  # fmt: skip
"""Methods of strings to the size of what they make."""
_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "center": _width_size, "indent": _indent_size, "replace": _replace_size, "join": _filter_join_size,
    "format": _percent_size, "wordwrap": _wordwrap_size, "batch": _count_size, "slice": _count_size,
}  # fmt: skip
"""Filters to the size of what they make."""

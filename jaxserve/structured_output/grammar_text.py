"""From a constraint to the text of a grammar, in the languages that llguidance reads: Lark and JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.structured_output.interface import GrammarError
from jaxserve.structured_output.structural_tag import WHITESPACE, structural_tag_grammar
from jaxserve.structured_outputs_params import StructuredOutputsParams

MAX_RULES = 1024
"""Rules and terminals of a grammar: some passes over them take quadratic time."""
_RULE = re.compile(r"^[ \t]*[?!]?[\w-]+[ \t]*(?:\.-?\d+|\[[^\]\n]*\])?[ \t]*(?::|::=)", re.MULTILINE)


def grammar_text(params: StructuredOutputsParams, special_tokens: Sequence[str]) -> str:
    """The grammar of a constraint.

    Args:
        params: the constraint.
        special_tokens: spellings of the tokens that are no text.

    Raises:
        GrammarError: it cannot be read.
    """
    match params.kind:
        case "json":
            return _json_grammar(json.loads(params.spec), params)
        case "json_object":
            return _json_grammar({"type": "object"}, params)
        case "regex":
            return f"start: /{regex_to_lark(params.spec, 'd')}/"  # \\d is 0 to 9, no other script's digits
        case "choice":
            assert params.choice is not None
            return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        case "structural_tag":
            return structural_tag_grammar(json.loads(params.spec), special_tokens)
        case _:
            return _lark(params.spec)


def _json_grammar(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    defaults: dict[str, Any] = {} if params.disable_any_whitespace else {"whitespace_pattern": WHITESPACE}
    overrides: dict[str, Any] = {}
    if params.disable_any_whitespace:
        overrides["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        overrides["whitespace_pattern"] = params.whitespace_pattern
    if params.disable_additional_properties:
        schema = cast("dict[str, Any]", _closed(schema))
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults=cast(Any, defaults), overrides=cast(Any, overrides)
    )


_SAYS_MORE = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"})
_HOLDS_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are data, not schemas."""
_HOLDS_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)


def _closed(schema: object) -> object:
    """``schema`` with ``additionalProperties: false`` wherever properties are listed and nothing is said of others."""
    if isinstance(schema, list):
        return [_closed(item) for item in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, object] = {}
    for key, value in cast("dict[str, object]", schema).items():
        if key in _HOLDS_VALUES:
            result[key] = value
        elif key in _HOLDS_SCHEMAS_BY_NAME and isinstance(value, dict):
            named = cast("dict[str, object]", value)
            result[key] = {name: _closed(inner) for name, inner in named.items()}
        else:
            result[key] = _closed(value)
    if "properties" in result and not _SAYS_MORE & result.keys():
        result["additionalProperties"] = False
    return result


def _lark(text: str) -> str:
    num_rules = len(_RULE.findall(text))
    if num_rules > MAX_RULES:
        raise GrammarError(f"has {num_rules} rules; at most {MAX_RULES} are allowed.")
    try:
        return any_to_lark(text)
    except RecursionError:
        raise GrammarError("is nested too deeply.") from None
    except Exception as error:  # the converter's own errors are plain exceptions
        raise GrammarError(f"is no valid GBNF grammar: {error}") from None

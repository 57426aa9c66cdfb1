"""Constraints of every kind with what checks an output: JSON schemas, regular expressions, grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from jaxserve.structured_outputs_params import StructuredOutputsParams

STRING = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "string": {"type": "string", "maxLength": 8},
    "string_lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "integer": {"type": "integer"},
    "integer_bounds": {"type": "integer", "minimum": 0, "maximum": 120},
    "integer_exclusive": {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
    "integer_negative": {"type": "integer", "minimum": -1000, "maximum": -10},
    "integer_multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 500},
    "number_bounds": {"type": "number", "minimum": 0.5, "maximum": 2.75},
    "number_exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "type_list": {"type": ["integer", "null", "boolean"]},
    "enum_strings": {"enum": ["red", "green", "blue"]},
    "enum_mixed": {"enum": [1, "one", None, True, 1.5, [1, 2], {"a": 1}]},
    "const": {"const": "exactly this"},
    "const_object": {"const": {"a": [1, 2, {"b": None}]}},
    "object": {"type": "object", "properties": {"a": STRING, "b": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": False},
    "object_optional": {"type": "object", "properties": {"a": STRING, "b": {"type": "boolean"}, "c": {"type": "null"}}, "additionalProperties": False},
    "object_one_required": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}}, "required": ["b"], "additionalProperties": False},
    "object_additional": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 3},
    "object_quoted_names": {"type": "object", "properties": {"a \"b\" \\ c": {"type": "boolean"}, "é\n": {"type": "null"}}, "required": ["a \"b\" \\ c", "é\n"], "additionalProperties": False},
    "pattern_properties": {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": {"type": "boolean"}}, "additionalProperties": False, "maxProperties": 2},
    "empty_object": {"type": "object", "additionalProperties": False},
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 5},
    "array_lengths": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "array_prefix": {"type": "array", "prefixItems": [{"type": "integer"}, STRING], "items": False, "minItems": 2},
    "array_prefix_rest": {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
    "matrix": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "integer", "minimum": 0, "maximum": 9}}},
    "nested": {"type": "object", "properties": {"user": {"type": "object", "properties": {"name": STRING, "address": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}, "required": ["zip"], "additionalProperties": False}}, "required": ["name", "address"], "additionalProperties": False}}, "required": ["user"], "additionalProperties": False},
    "nested_arrays": {"type": "object", "properties": {"rows": {"type": "array", "maxItems": 3, "items": {"type": "object", "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["id", "ok"], "additionalProperties": False}}}, "required": ["rows"], "additionalProperties": False},
    "any_of": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "boolean"}, STRING]},
    "any_of_objects": {"anyOf": [{"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "integer"}}, "required": ["kind", "r"], "additionalProperties": False}, {"type": "object", "properties": {"kind": {"const": "square"}, "side": {"type": "integer"}}, "required": ["kind", "side"], "additionalProperties": False}]},
    "one_of": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "all_of": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
    "all_of_objects": {"allOf": [{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}, {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}], "maxProperties": 2},
    "optional_null": {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, "required": ["a"], "additionalProperties": False},
    "ref": {"$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"], "additionalProperties": False}}, "type": "object", "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}, "required": ["from", "to"], "additionalProperties": False},
    "ref_definitions": {"definitions": {"n": {"type": "integer", "minimum": 1, "maximum": 3}}, "type": "array", "items": {"$ref": "#/definitions/n"}, "minItems": 1, "maxItems": 3},
    "ref_chain": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": {"enum": ["end"]}}, "$ref": "#/$defs/a"},
    "recursive_list": {"$defs": {"node": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    "recursive_tree": {"type": "object", "properties": {"n": {"type": "boolean"}, "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}}}, "required": ["n"], "additionalProperties": False},
    "recursive_mutual": {"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "additionalProperties": False}, "b": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
    "recursive_expression": {"$defs": {"e": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "object", "properties": {"op": {"enum": ["+", "*"]}, "l": {"$ref": "#/$defs/e"}, "r": {"$ref": "#/$defs/e"}}, "required": ["op", "l", "r"], "additionalProperties": False}]}}, "$ref": "#/$defs/e"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern_unanchored": {"type": "string", "pattern": "abc", "maxLength": 8},
    "pattern_lengths": {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 6},
    "format_date": {"type": "string", "format": "date"},
    "format_time": {"type": "string", "format": "date-time"},
    "format_uuid": {"type": "string", "format": "uuid"},
    "format_ipv4": {"type": "string", "format": "ipv4"},
    "format_email": {"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}, "ip": {"type": "string", "format": "ipv4"}}, "required": ["id", "ip"], "additionalProperties": False},
    "annotations": {"title": "T", "description": "d", "type": "object", "properties": {"a": {"type": "boolean", "default": True, "examples": [False], "title": "A"}}, "required": ["a"], "additionalProperties": False, "$schema": "https://json-schema.org/draft/2020-12/schema"},
    "any_json_object": {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "boolean"}},
}  # fmt: skip
"""Name to schema."""

REGEXES = [
    r"[0-9]{3}-[0-9]{4}", r"(yes|no|maybe)", r"a+b*c?", r"[A-Z][a-z]{2,8}", r"#[0-9a-f]{6}",
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", r"([01]?[0-9]|2[0-3]):[0-5][0-9]",
    r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)", r"-?[0-9]+(\.[0-9]{1,3})?", r"(ab|cd){2,4}", r"[^0-9a-z]{1,3}!",
    r"\(\d+\)", r"x{5}", r"(?i)hello", r"é{1,2}|ü", r"a\\b\"c/d", r"\s?\w{1,4}\s?", r"(a|b)(c|d)(e|f)?", r"[\n\t]{1,3}end",
]  # fmt: skip
"""Whole outputs match; all of them mean the same to Python's ``re``."""


@dataclass(frozen=True)
class GrammarCase:
    """A grammar and whether a text is in its language."""

    text: str
    accepts: Callable[[str], bool]


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}[character]
        if depth < 0:
            return False
    return depth == 0 and text != ""


def same_counts(text: str) -> bool:
    half = len(text) // 2
    return text == "a" * half + "b" * half and half > 0


def is_expression(text: str) -> bool:
    if not re.fullmatch(r"[0-9+*() ]+", text):
        return False
    try:
        eval(re.sub(r"\b0+(?=\d)", "", text), {"__builtins__": {}})  # digits, + * ( ) alone
    except (SyntaxError, TypeError):
        return False
    return True


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


GRAMMARS = [
    GrammarCase('start: "(" start ")" | "()"', balanced),
    GrammarCase('root ::= "a" root "b" | "ab"', same_counts),
    GrammarCase('start: GREETING " " NAME\nGREETING: "hello" | "hi"\nNAME: /[A-Z][a-z]{1,5}/', matches(r"(hello|hi) [A-Z][a-z]{1,5}")),
    GrammarCase('root ::= ("yes" | "no") ("!" | "?")?', matches(r"(yes|no)[!?]?")),
    GrammarCase('start: expr\nexpr: term | expr "+" term\nterm: /[1-9]/ | term "*" /[1-9]/ | "(" expr ")"', is_expression),
    GrammarCase('root ::= item ("," item){0,3}\nitem ::= [a-z]{1,4} "=" [0-9]', matches(r"[a-z]{1,4}=[0-9](,[a-z]{1,4}=[0-9]){0,3}")),
    GrammarCase('start: "SELECT " COLS " FROM " TABLE\nCOLS: "*" | /[a-c](, [a-c]){0,2}/\nTABLE: "t1" | "t2"', matches(r"SELECT (\*|[a-c](, [a-c]){0,2}) FROM t[12]")),
    GrammarCase('start: obj\nobj: "{" "\\"k\\"" ":" val "}"\nval: obj | "1" | "[" "]"', is_json),
    GrammarCase('root ::= line+\nline ::= "- " [^\\n]{1,6} "\\n"', matches(r"(- [^\n]{1,6}\n)+")),
    GrammarCase('start: /a{2,4}/ "é"', matches(r"a{2,4}é")),
    GrammarCase('start: %json {"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false} ";"', matches(r'\{\s*"a"\s*:\s*(true|false)\s*\};')),
]  # fmt: skip


def validates(schema: dict[str, Any], text: str) -> bool:
    """Whether ``text`` is one JSON document that fits the schema, formats included."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))


def schema_params(schema: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema)


Case = tuple[str, StructuredOutputsParams, Callable[[str], bool]]


def all_cases() -> list[Case]:
    """Every constraint: its name, its parameters, and what checks an output."""
    cases: list[Case] = []
    for name, schema in SCHEMAS.items():
        cases.append((f"json-{name}", StructuredOutputsParams(json=schema), lambda t, s=schema: validates(s, t)))
    for index, regex in enumerate(REGEXES):
        cases.append((f"regex-{index}", StructuredOutputsParams(regex=regex), matches(regex)))
    for index, case in enumerate(GRAMMARS):
        cases.append((f"grammar-{index}", StructuredOutputsParams(grammar=case.text), case.accepts))
    choices = ["one", 'two "quoted"', "drei\nvier", "é😀", "<|im_end|>", "a\\b", "one two"]
    cases.append(("choice", StructuredOutputsParams(choice=choices), lambda t: t in choices))
    return cases

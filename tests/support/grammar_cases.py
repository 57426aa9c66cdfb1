"""Constraints of every kind with what checks an output: JSON schemas, regular expressions, grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from jaxserve.structured_outputs_params import StructuredOutputsParams

FIXTURE = Path(__file__).parents[1] / "fixtures" / "structured_output" / "schemas.json"
SCHEMAS: dict[str, dict[str, Any]] = json.loads(FIXTURE.read_text(encoding="utf-8"))
"""Name to schema."""

REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(yes|no|maybe)",
    r"a+b*c?",
    r"[A-Z][a-z]{2,8}",
    r"#[0-9a-f]{6}",
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    r"([01]?[0-9]|2[0-3]):[0-5][0-9]",
    r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)",
    r"-?[0-9]+(\.[0-9]{1,3})?",
    r"(ab|cd){2,4}",
    r"[^0-9a-z]{1,3}!",
    r"\(\d+\)",
    r"x{5}",
    r"(?i)hello",
    r"é{1,2}|ü",
    r"a\\b\"c/d",
    r"\s?[A-Za-z]{1,4}\s?",
    r"(a|b)(c|d)(e|f)?",
    r"[\n\t]{1,3}end",
]
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
    GrammarCase(
        'start: GREETING " " NAME\nGREETING: "hello" | "hi"\nNAME: /[A-Z][a-z]{1,5}/',
        matches(r"(hello|hi) [A-Z][a-z]{1,5}"),
    ),
    GrammarCase('root ::= ("yes" | "no") ("!" | "?")?', matches(r"(yes|no)[!?]?")),
    GrammarCase(
        'start: expr\nexpr: term | expr "+" term\nterm: /[1-9]/ | term "*" /[1-9]/ | "(" expr ")"',
        is_expression,
    ),
    GrammarCase(
        'root ::= item ("," item){0,3}\nitem ::= [a-z]{1,4} "=" [0-9]',
        matches(r"[a-z]{1,4}=[0-9](,[a-z]{1,4}=[0-9]){0,3}"),
    ),
    GrammarCase(
        'start: "SELECT " COLS " FROM " TABLE\nCOLS: "*" | /[a-c](, [a-c]){0,2}/\nTABLE: "t1" | "t2"',
        matches(r"SELECT (\*|[a-c](, [a-c]){0,2}) FROM t[12]"),
    ),
    GrammarCase('start: obj\nobj: "{" "\\"k\\"" ":" val "}"\nval: obj | "1" | "[" "]"', is_json),
    GrammarCase('root ::= line+\nline ::= "- " [^\\n]{1,6} "\\n"', matches(r"(- [^\n]{1,6}\n)+")),
    GrammarCase('start: /a{2,4}/ "é"', matches(r"a{2,4}é")),
    GrammarCase(
        'start: %json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], '
        '"additionalProperties": false} ";"',
        matches(r'\{\s*"a"\s*:\s*(true|false)\s*\};'),
    ),
]


def validates(schema: dict[str, Any], text: str) -> bool:
    """Whether ``text`` is one JSON document that fits the schema, formats included."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    text = text.replace('"0000-', '"0004-')  # RFC 3339 has a year 0, Python's dates have none
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))


def schema_params(schema: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema)


Case = tuple[str, StructuredOutputsParams, Callable[[str], bool]]


def all_cases() -> list[Case]:
    """Every constraint: its name, its parameters, and what checks an output."""
    cases: list[Case] = []
    for name, schema in SCHEMAS.items():
        cases.append(
            (f"json-{name}", StructuredOutputsParams(json=schema), lambda t, s=schema: validates(s, t))
        )
    for index, regex in enumerate(REGEXES):
        cases.append((f"regex-{index}", StructuredOutputsParams(regex=regex), matches(regex)))
    for index, case in enumerate(GRAMMARS):
        cases.append((f"grammar-{index}", StructuredOutputsParams(grammar=case.text), case.accepts))
    choices = ["one", 'two "quoted"', "drei\nvier", "é😀", "<|im_end|>", "a\\b", "one two"]
    cases.append(("choice", StructuredOutputsParams(choice=choices), lambda t: t in choices))
    return cases

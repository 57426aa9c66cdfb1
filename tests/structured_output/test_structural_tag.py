"""Structural tags: free text stays free, tags follow their grammars, and malformed ones are refused."""

from __future__ import annotations

import json
import re

import pytest
from grammar_walk import walk

from jaxserve.structured_output.interface import GrammarError
from jaxserve.structured_output.llguidance_backend import LLGuidanceBackend
from jaxserve.structured_outputs_params import StructuredOutputsParams
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TAGS = [
    {"begin": "<f=one>", "schema": SCHEMA, "end": "</f>"},
    {"begin": "<f=two>", "schema": {"enum": [1, 2]}, "end": "</f>"},
]


def accepts(backend: LLGuidanceBackend, tokenizer: FastTokenizer, tag: dict, text: str) -> bool:
    """Whether ``text`` is a whole output, token by token."""
    matcher = backend.compile(
        StructuredOutputsParams(structural_tag={"type": "structural_tag", **tag})
    ).start()
    try:
        for token_id in [*tokenizer.encode(text), backend.eos_token_ids[0]]:
            matcher.accept(token_id)
    except GrammarError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no tag at all, < or f= or </f>", True),
        ('I call <f=one>{"a": true}</f> and <f=two>2</f> now.', True),
        ('<f=one>{"a":false}</f>', True),
        ('<f=one>{"b":false}</f>', False),
        ("<f=three>1</f>", False),
        ("<f=two>3</f>", False),
        ("<f=two>2", False),
        ("text <f=", False),
        ("", True),
    ],
)
def test_structures(smollm2_backend, smollm2, text, expected):
    assert accepts(smollm2_backend, smollm2, {"structures": TAGS, "triggers": ["<f="]}, text) is expected


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": {"enum": [1]}}, "end": "</f>"}
    ],
}


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ({**TRIGGERED, "at_least_one": True}, "none", False),
        ({**TRIGGERED, "at_least_one": True}, "a <f=x>1</f> b", True),
        ({**TRIGGERED, "stop_after_first": True}, "a <f=x>1</f>", True),
        ({**TRIGGERED, "stop_after_first": True}, "a <f=x>1</f> b", False),
        ({**TRIGGERED, "stop_after_first": True}, "none", True),
        ({"type": "const_string", "value": 'say "hi"'}, 'say "hi"', True),
        ({"type": "regex", "pattern": r"a/b\d"}, "a/b7", True),
        ({"type": "any_text"}, "anything\nat all", True),
        (
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": "x"}, {"type": "regex", "pattern": "y+"}],
            },
            "yy",
            True,
        ),
        (
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": "x"}, {"type": "regex", "pattern": "y+"}],
            },
            "z",
            False,
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                    {"type": "json_schema", "json_schema": SCHEMA},
                ],
            },
            '<think>well</think>{"a": true}',
            True,
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                    {"type": "json_schema", "json_schema": SCHEMA},
                ],
            },
            "<think>well</think>no",
            False,
        ),
        (
            {
                "type": "tag",
                "begin": "<|im_start|>tool",
                "content": {"type": "json_schema", "json_schema": {"enum": [1]}},
                "end": "<|im_start|>",
            },
            "<|im_start|>tool1<|im_start|>",
            True,
        ),
    ],
)
def test_formats(smollm2_backend, smollm2, form, text, expected):
    assert accepts(smollm2_backend, smollm2, {"format": form}, text) is expected


def test_walks_fill_in_the_tags(smollm2_backend, smollm2):
    form = {**TRIGGERED, "at_least_one": True, "stop_after_first": True, "triggers": ["<|im_start|>"]}
    form["tags"] = [
        {"begin": "<|im_start|>call", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "!"}
    ]
    grammar = smollm2_backend.compile(
        StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "ok"}, form["tags"][0] | {"type": "tag"}]}})
    )  # fmt: skip
    for seed in range(6):
        tokens, complete = walk(smollm2_backend, grammar, seed)
        assert complete
        text = smollm2.decode(tokens, skip_special_tokens=False)
        match = re.fullmatch(r"ok<\|im_start\|>call(.*)!", text, re.DOTALL)
        assert match, text
        assert set(json.loads(match[1])) == {"a"}


@pytest.mark.parametrize(
    "tag",
    [
        {},
        {"type": "other"},
        {"type": "structural_tag"},
        {"type": "structural_tag", "structures": [], "triggers": ["<"]},
        {"type": "structural_tag", "structures": TAGS, "triggers": []},
        {"type": "structural_tag", "structures": TAGS, "triggers": ["<g="]},
        {"type": "structural_tag", "structures": [1], "triggers": ["<"]},
        {"type": "structural_tag", "structures": [{"begin": "<f=", "end": ">"}], "triggers": [5]},
        {"type": "structural_tag", "format": {"type": "unknown"}},
        {"type": "structural_tag", "format": {"type": ["list"]}},
        {"type": "structural_tag", "format": {"type": "regex", "pattern": "("}},
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "foo"}}},
        {"type": "structural_tag", "format": {"type": "sequence", "elements": ["x"]}},
    ],
)
def test_malformed_tags_are_refused(smollm2_backend, tag):
    with pytest.raises(GrammarError):
        smollm2_backend.compile(StructuredOutputsParams(structural_tag=tag))

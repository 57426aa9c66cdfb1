"""Grammars of strict tools: calls keep to their schemas, the text around them is free, and parsers read the result."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from jaxserve.parsers import ParserNames, ParserSet, parse_output
from jaxserve.server.openai.tool_output import OutputPlan, strict_calls
from jaxserve.server.openai.tools import ToolChoice, check_tools
from jaxserve.structured_output.compiler import GrammarCompiler

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = check_tools(
    [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}]
)
SCHEMAS = {"get_weather": SCHEMA}


def plan(name: str, parallel: bool = True) -> OutputPlan:
    return OutputPlan(
        ParserSet(ParserNames(name), None), [], TOOLS, {}, ToolChoice("auto"), parallel_tool_calls=parallel
    )


@pytest.mark.parametrize("name", ["hermes", "deepseek_v3"])
def test_a_call_once_begun_keeps_to_the_schema(name: str, compiler: GrammarCompiler, smollm2):
    model_plan = plan(name)
    params = strict_calls(model_plan, TOOLS, SCHEMAS)
    assert params is not None
    tag = model_plan.parsers.tool_class.call_tag("get_weather")
    matcher = compiler.submit(params).result(20).start()
    ids = smollm2.encode("Let me see. " + tag.trigger, add_special_tokens=False)
    for token_id in ids:
        matcher.accept(token_id)
    rng = random.Random(name)
    masks = np.zeros((1, compiler.backend.num_words), np.int32)
    while tag.end not in (text := smollm2.decode(ids)):
        assert len(ids) < 1000
        compiler.fill_masks([matcher], masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()
        ids.append(min(rng.choices(allowed, k=8), key=lambda i: smollm2.decode([i]).isspace()))
        matcher.accept(ids[-1])
    text = text[: text.index(tag.end) + len(tag.end)]  # the last token may reach beyond
    output = parse_output(model_plan.parsers.create(tools=SCHEMAS), text)
    assert output.content == "Let me see."
    (call,) = output.tool_calls
    arguments = json.loads(call.arguments)
    assert call.name == "get_weather"
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] in (1, 2, 3)


@pytest.mark.parametrize("parallel", [True, False])
def test_other_text_is_free(parallel: bool, compiler: GrammarCompiler, smollm2):
    params = strict_calls(plan("hermes", parallel), TOOLS, SCHEMAS)
    assert params is not None
    matcher = compiler.submit(params).result(20).start()
    for token_id in smollm2.encode("No <tool> is needed: 1 < 2, é.\n", add_special_tokens=False):
        matcher.accept(token_id)
    masks = np.zeros((1, compiler.backend.num_words), np.int32)
    compiler.fill_masks([matcher], masks)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    assert bits[compiler.backend.eos_token_ids[0]], "the answer may end without a call"


def test_syntaxes_without_a_form_are_not_constrained():
    assert strict_calls(plan("qwen3_coder"), TOOLS, SCHEMAS) is None

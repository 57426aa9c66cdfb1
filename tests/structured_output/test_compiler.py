"""GrammarCompiler: one compilation a grammar, a bounded memory, errors that name the parameter, hostile input."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.structured_output import compiler as compiler_module
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.structured_output.interface import GrammarError
from jaxserve.structured_output.llguidance_backend import LLGuidanceBackend
from jaxserve.structured_output.vocabulary import Vocabulary
from jaxserve.structured_outputs_params import StructuredOutputsParams

BYTES = [bytes([value]) for value in range(256)] + [b"<eos>"]


class CountingBackend:
    """Compiles nothing, and counts how often."""

    eos_token_ids = (0,)
    num_words = 1

    def __init__(self, error: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.compiled: list[str] = []
        self.error, self.gate = error, gate

    def compile(self, params: StructuredOutputsParams) -> object:
        self.compiled.append(params.spec)
        if self.gate is not None:
            self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return object()

    def fill_masks(self, matchers, masks) -> None:
        raise AssertionError


@pytest.fixture(scope="module")
def bytes_compiler():
    vocabulary = Vocabulary(BYTES, [256], [256], None, lambda text: list(text.encode()))
    compiler = GrammarCompiler(lambda: LLGuidanceBackend(vocabulary))
    yield compiler
    compiler.close()


def regex(pattern: str, **options: object) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern, **options)


def test_equal_grammars_are_compiled_once():
    backend = CountingBackend()
    compiler = GrammarCompiler(lambda: backend)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: compiler.check(regex("a")), range(50)))
    schema = {"type": "object"}
    compiler.check(StructuredOutputsParams(json=schema))
    compiler.check(StructuredOutputsParams(json=json.dumps(schema, indent=4)))
    compiler.check(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    compiler.check(StructuredOutputsParams(json=schema, param="response_format"))
    assert backend.compiled == ["a", '{"type":"object"}', '{"type":"object"}']
    compiler.close()


def test_the_least_recently_used_grammar_is_forgotten():
    backend = CountingBackend()
    compiler = GrammarCompiler(lambda: backend, max_cached=2)
    for pattern in "abacab":
        compiler.check(regex(pattern))
    assert backend.compiled == ["a", "b", "c", "b"]
    compiler.close()


def test_costly_grammars_are_forgotten_sooner(monkeypatch):
    class Costly(CountingBackend):
        def compile(self, params):
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
            return super().compile(params)

    monkeypatch.setattr(compiler_module, "MAX_CACHED_SECONDS", 0.05)
    backend = Costly()
    compiler = GrammarCompiler(lambda: backend)
    for pattern in "abcdca":
        compiler.check(regex(pattern))
    compiler.close()
    assert backend.compiled == ["a", "b", "c", "d", "a"]


def test_the_parameter_is_named_as_the_request_spelt_it():
    compiler = GrammarCompiler(lambda: CountingBackend(GrammarError("is odd.")))
    for given, param in [({}, "structured_outputs.regex"), ({"param": "response_format"}, "response_format")]:
        with pytest.raises(InvalidRequestError, match=f"^{param} is odd") as caught:
            compiler.check(regex("a", **given))
        assert caught.value.param == param
    compiler.close()


def test_what_goes_wrong_inside_is_no_crash():
    compiler = GrammarCompiler(lambda: CountingBackend(RuntimeError("bug")))
    with pytest.raises(InvalidRequestError, match="cannot be compiled"):
        compiler.check(regex("a"))
    compiler.close()


def test_a_backend_that_cannot_be_made_says_so_every_time():
    def load():
        raise UnsupportedError("no tokenizer", param="structured_outputs")

    compiler = GrammarCompiler(load)
    for pattern in "ab":
        with pytest.raises(UnsupportedError, match="no tokenizer"):
            compiler.check(regex(pattern))
    compiler.close()


def test_the_event_loop_goes_on_and_the_wait_is_limited():
    gate = threading.Event()
    compiler = GrammarCompiler(lambda: CountingBackend(gate=gate), seconds=0.2)

    async def run() -> int:
        ticks, task = 0, asyncio.create_task(compiler.check_async(regex("a")))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequestError, match="too long"):
            task.result()
        gate.set()
        compiler.seconds = 20
        await compiler.check_async(regex("b"))
        await compiler.check_async(regex("b"))
        return ticks

    assert asyncio.run(run()) > 3
    compiler.close()


CHAIN = 6000
HOSTILE = {
    "chain of references": {"json": {"$ref": "#/$defs/d0", "$defs": {
        **{f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(CHAIN - 2000)},
        f"d{CHAIN - 2000}": {"type": "string"}}}},
    "endless reference": {"json": {"$ref": "#"}},
    "endless allOf": {"json": {"allOf": [{"$ref": "#"}]}},
    "product of unions": {"json": {"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"a{i}": {}}}, {"type": "object", "properties": {f"b{i}": {}}}]}
        for i in range(24)]}},
    "chain of rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(1000)) + '\nr1000: "a"'},
    "too many rules": {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"'},
    "nested groups": {"grammar": "start: " + "(" * 20000 + '"a"' + ")" * 20000},
    "nested groups, GBNF": {"grammar": "root ::= " + "(" * 20000 + '"a"' + ")" * 20000},
    "nested regex": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "repeated repetitions": {"regex": "((a{0,99}b){0,99}c){0,99}"},
    "many options": {"regex": "a?" * 5000},
    "many properties": {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}},
    "large enum": {"json": {"enum": [f"value {i}" for i in range(9000)]}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_neither_crash_nor_hang(bytes_compiler: GrammarCompiler, name):
    params = StructuredOutputsParams(**HOSTILE[name])
    try:
        grammar = bytes_compiler.submit(params).result(20)
    except GrammarError:
        return
    matcher = grammar.start()
    import numpy as np

    mask = np.zeros((1, bytes_compiler.backend.num_words), np.int32)
    bytes_compiler.fill_masks([matcher], mask)


BROKEN = {
    "unsatisfiable bounds": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "empty enum": {"json": {"enum": []}},
    "contradiction": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "unknown type": {"json": {"type": "text"}},
    "unknown keyword": {"json": {"not": {"type": "string"}}},
    "unknown format": {"json": {"type": "string", "format": "colour"}},
    "missing reference": {"json": {"$ref": "#/$defs/none"}},
    "remote reference": {"json": {"$ref": "https://example.com/schema.json"}},
    "bad pattern": {"json": {"type": "string", "pattern": "("}},
    "bad regex": {"regex": "a("},
    "look-ahead": {"regex": "a(?=b)"},
    "nothing matches": {"regex": r"[^\s\S]"},
    "unknown rule": {"grammar": "start: missing"},
    "no start": {"grammar": 'other: "a"'},
    "bad GBNF": {"grammar": "root ::= ("},
    "bad white space": {"json": {"type": "object"}, "whitespace_pattern": "("},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_grammars_are_refused(bytes_compiler: GrammarCompiler, name):
    params = StructuredOutputsParams(**BROKEN[name])
    with pytest.raises(InvalidRequestError) as caught:
        bytes_compiler.check(params)
    assert caught.value.param == f"structured_outputs.{params.kind}"
    assert len(caught.value.message) < 500

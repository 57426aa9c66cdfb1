"""LLM as notebooks use it: built again and again, interrupted, with outputs kept, inside a running event loop."""

from __future__ import annotations

import asyncio
import gc
import linecache
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine import llm as llm_module
from jaxserve.engine.core import EngineCore
from jaxserve.errors import ConfigError, OutOfMemoryError

pytestmark = pytest.mark.device

ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 8, "num_gpu_blocks_override": 200}
"""Those of ``conftest.py``: the programs are stored by the first of them."""
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)


def build(model: Path) -> LLM:
    return LLM(str(model), **ENGINE)


def device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def held_by(llm: LLM) -> int:
    runner: Any = llm._core.runner
    return sum(leaf.nbytes for leaf in jax.tree.leaves((runner.params, runner.state)))


@pytest.fixture(scope="module", autouse=True)
def others_are_gone():
    """Engines that earlier tests dropped without closing would be freed while this one counts."""
    gc.collect()


def test_an_llm_that_nobody_refers_to_frees_its_memory(tiny_model):
    before = device_bytes()
    llm = build(tiny_model)
    size = held_by(llm)
    kept = llm.generate(["hello", "world"], PARAMS, use_tqdm=False)  # what a notebook's Out[] holds
    assert device_bytes() >= before + size
    del llm
    assert device_bytes() < before + size / 10
    assert all(output.outputs[0].logprobs for output in kept)

    llm = build(tiny_model)
    llm = build(tiny_model)  # the second takes the name of the first
    assert device_bytes() < before + 1.1 * size
    assert (
        llm.generate("hello", PARAMS, use_tqdm=False)[0].outputs[0].token_ids == kept[0].outputs[0].token_ids
    )
    llm.close()
    assert device_bytes() < before + size / 10


def test_an_interrupted_call_does_not_keep_its_llm(tiny_model, monkeypatch):
    """The interpreter keeps the exception, and the frames it passed, for its debugger."""
    before = device_bytes()
    llm = build(tiny_model)
    size = held_by(llm)

    def interrupted() -> None:
        raise KeyboardInterrupt

    llm._core.step, step = interrupted, llm._core.step
    try:
        llm.generate("hello", PARAMS, use_tqdm=False)
    except KeyboardInterrupt as error:
        for frame, _ in list(traceback.walk_tb(error.__traceback__))[1:]:
            frame.f_locals.keys()  # it shows them, which copies them before Python 3.13
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    llm._core.step = step
    assert len(llm.generate("hello", PARAMS, use_tqdm=False)) == 1
    del llm, step
    assert device_bytes() > before + size / 2, "the exception should hold it"
    llm = build(tiny_model)
    assert device_bytes() < before + 1.1 * size
    llm.close()


def run_cell(source: str, namespace: dict[str, Any]) -> None:
    """As a notebook runs one: its source is where tracebacks look for it."""
    name = f"<cell {source}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)


def test_a_cell_that_runs_again_needs_the_memory_of_one(tiny_model, monkeypatch):
    before, at_start = device_bytes(), []

    def create_core(config: EngineConfig) -> EngineCore:
        at_start.append(device_bytes() - before)
        return whole(config)

    whole = llm_module.create_core
    monkeypatch.setattr(llm_module, "create_core", create_core)
    namespace: dict[str, Any] = {"LLM": LLM, "model": str(tiny_model), "options": ENGINE}
    assign, print_only = "x = 1\nllm = LLM(\n    model, **options\n)\n", "LLM(model, **options).close()\n"
    run_cell(assign, namespace)
    size = held_by(namespace["llm"])
    with pytest.raises(ConfigError):
        run_cell("llm = LLM(model, max_num_sequences=3)", namespace)
    assert "llm" in namespace, "what is refused replaces nothing"
    run_cell(print_only, namespace)
    run_cell(assign, namespace)
    kept = namespace["kept"] = namespace["llm"]
    run_cell(assign, namespace)
    assert [round(used / size) for used in at_start] == [0, 1, 0, 1]
    assert len(kept.generate("hello", PARAMS, use_tqdm=False)) == 1, "somebody else refers to it"
    kept.close()
    namespace["llm"].close()


def test_a_start_that_fails_frees_what_it_loaded(tiny_model, monkeypatch):
    from jaxserve.runner.preparation import Preparation

    def interrupted(self: object) -> None:
        assert device_bytes() > before
        raise KeyboardInterrupt

    before = device_bytes()
    monkeypatch.setattr(Preparation, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        build(tiny_model)
    assert caught.value.__traceback__ is not None  # the runner is still referred to
    assert device_bytes() == before


def test_an_llm_that_finds_no_memory_names_those_that_hold_some(tiny_model, make_llm, monkeypatch):
    make_llm()

    def create_core(config: object) -> None:
        raise OutOfMemoryError("No block of KV cache fits.")

    monkeypatch.setattr(llm_module, "create_core", create_core)
    with pytest.raises(
        OutOfMemoryError, match=r"fits\. This process also holds an LLM of .*llama.*: close\(\)"
    ):
        build(tiny_model)


def test_inside_a_running_event_loop(make_llm):
    async def cell() -> list[int]:
        return make_llm().generate("hello", PARAMS)[0].outputs[0].token_ids

    outside = make_llm().generate("hello", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    assert asyncio.run(cell()) == outside

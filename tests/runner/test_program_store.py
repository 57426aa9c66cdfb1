"""Compiled programs on disk: found again, keyed by all they depend on, and never in the way."""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.runner.compilation import Compilation
from jaxserve.runner.device_kernels import DeviceKernels
from jaxserve.runner.engine_programs import EnginePrograms
from jaxserve.runner.invariance import Invariance
from jaxserve.runner.model_runner import JaxModelRunner
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_store import ProgramStore, prune
from jaxserve.runner.served_model import ModelBuilder

pytestmark = pytest.mark.device


def compile_all(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return Compilation(*args, **kwargs).result()


def lowering(counter: list[int]):
    def lower():
        counter.append(1)
        state = {"a": jax.ShapeDtypeStruct((4,), jnp.float32)}
        return jax.jit(lambda s, x: ({"a": s["a"] + x}, x), donate_argnums=0).lower(
            state, jax.ShapeDtypeStruct((), jnp.float32)
        )

    return lower


def test_a_second_start_lowers_nothing(tmp_path):
    counter: list[int] = []
    for start in range(2):
        store = ProgramStore(tmp_path / "store", "an engine")
        programs = compile_all({"add": lowering(counter)}, store)
        out, _ = programs["add"]({"a": jnp.arange(4.0)}, jnp.float32(2))
        assert out["a"].tolist() == [2, 3, 4, 5]
        assert store.hits == start
    assert len(counter) == 1


def test_progress_counts_loaded_programs_too(tmp_path):
    for _ in range(2):
        seen: list[tuple[int, int]] = []
        lowerings = {name: lowering([]) for name in "abc"}
        compile_all(lowerings, ProgramStore(tmp_path, "x"), lambda done, total: seen.append((done, total)))  # noqa: B023
        assert sorted(seen) == [(1, 3), (2, 3), (3, 3)]


def test_a_program_that_cannot_be_made_fails_the_start_by_its_name(tmp_path):
    def lower():
        raise NotImplementedError("no such kernel")

    lowerings = {"add": lowering([]), "multiply": lower}
    with pytest.raises(NotImplementedError, match="no such kernel") as raised:
        compile_all(lowerings, ProgramStore(tmp_path, "x"), name=lambda key: f"the program {key}")
    assert raised.value.__notes__ == ["This program cannot be made: the program multiply"]


@pytest.mark.parametrize("change", ["description", "key", "flags"])
def test_what_a_program_depends_on_is_in_its_key(tmp_path, monkeypatch, change):
    from jaxserve.runner import program_store

    counter: list[int] = []
    compile_all({"add": lowering(counter)}, ProgramStore(tmp_path, "one"))
    if change == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
        program_store._surroundings.cache_clear()
    key = "sub" if change == "key" else "add"
    compile_all({key: lowering(counter)}, ProgramStore(tmp_path, "two" if change == "description" else "one"))
    program_store._surroundings.cache_clear()
    assert len(counter) == 2


def test_a_broken_file_is_compiled_again(tmp_path, caplog):
    counter: list[int] = []
    for _ in range(2):
        compile_all({"add": lowering(counter)}, ProgramStore(tmp_path, "x"))
        for file in tmp_path.iterdir():
            file.write_bytes(file.read_bytes()[:100])
    assert len(counter) == 2
    assert "compiled again" in caplog.text


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    programs = compile_all({"add": lowering([])}, ProgramStore(blocked / "store", "x"))
    assert programs["add"]({"a": jnp.zeros(4)}, jnp.float32(1))[1] == 1
    assert "could not be stored" in caplog.text


def test_a_full_disk_is_said_once_and_left_as_it_was(tmp_path, caplog, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    compile_all({"add": lowering([]), "sub": lowering([])}, ProgramStore(tmp_path, "x"))
    (message,) = caplog.messages
    assert f"in {tmp_path}: No space left on device" in message
    assert not list(tmp_path.iterdir())


def test_nothing_is_kept_without_a_folder():
    counter: list[int] = []
    for _ in range(2):
        compile_all({"add": lowering(counter)}, ProgramStore(None, "x"))
    assert len(counter) == 2


def test_numbers_are_remembered(tmp_path):
    calls: list[int] = []

    def make() -> int:
        calls.append(1)
        return 17

    assert [ProgramStore(tmp_path, "x").remember("temporaries", make) for _ in range(3)] == [17] * 3
    assert len(calls) == 1


def test_the_longest_unused_go_first(tmp_path, monkeypatch):
    import os

    monkeypatch.setattr("jaxserve.runner.program_store.MOST_FILES", 2)
    for age, name in enumerate("abcd"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (100 - age, 100 - age))
    prune(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}
    prune(None)


def test_programs_that_compute_in_another_order_have_keys_of_their_own():
    """Invariant programs have the shapes, the backend's name and the parameters of the others."""
    hf_config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    descriptions: list[str] = []
    for batch_invariant in (False, True):
        config = EngineConfig.from_kwargs(batch_invariant=batch_invariant)
        config, invariance = config.with_defaults_for("cpu"), Invariance(batch_invariant, "cpu")
        served = ModelBuilder(config, Placement(), DeviceKernels("cpu"), invariance).build(hf_config)
        programs = EnginePrograms(config, served, Placement(), invariance, partial(ProgramStore, None))
        descriptions.append(programs.description())
    assert descriptions[0] != descriptions[1]


@pytest.mark.parametrize("enforced", [False, True])
def test_a_step_that_compiles_fails_where_that_is_asked_for(enforced):
    config = EngineConfig.from_kwargs(enforce_no_compile=enforced)
    runner = JaxModelRunner(config.with_defaults_for("cpu"))
    runner.counter.start()
    runner._check_compilations(0)
    jax.jit(lambda x: x * 7 + 1)(jnp.arange(7.0))
    assert runner.num_compilations() > 0
    with pytest.raises(RuntimeError, match="compiled") if enforced else contextlib.nullcontext():
        runner._check_compilations(0)

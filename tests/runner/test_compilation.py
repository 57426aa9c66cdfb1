"""Programs in the making: lowered before they may be compiled, stored when nothing is left to lower, given up whole."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
from types import SimpleNamespace

import jax
import pytest

from jaxserve.runner.compilation import Compilation

pytestmark = pytest.mark.device
PATIENCE = 60.0


class Recorder:
    """Stands for programs and for their store, and notes what becomes of them."""

    def __init__(self, *stored: str) -> None:
        self.events: list[tuple[str, str]] = []
        self.stored = stored
        self.all_lowered = threading.Event()

    def lowerings(self, *names: str, fails: str = ""):
        def lower(name):
            if name == fails:
                raise NotImplementedError(name)
            self.events.append(("lower", name))
            if name == names[-1]:
                self.all_lowered.set()
            return SimpleNamespace(compile=lambda: self.note("compile", name))

        return {name: lambda name=name: lower(name) for name in names}

    def note(self, what: str, name: str) -> str:
        self.events.append((what, name))
        return name.upper()

    def load(self, key: str) -> str | None:
        return key.upper() if key in self.stored else None

    def save(self, key: str, program: str) -> None:
        self.note("save", key)

    def of(self, what: str) -> list[str]:
        return [name for event, name in self.events if event == what]


def test_programs_are_lowered_at_once_and_compiled_when_they_may_be():
    recorder = Recorder("b")
    making = Compilation(recorder.lowerings("a", "b", "c", "d"), recorder)
    assert recorder.all_lowered.wait(PATIENCE)
    assert recorder.events == [("lower", "a"), ("lower", "c"), ("lower", "d")]
    assert list(making.result().items()) == [("a", "A"), ("b", "B"), ("c", "C"), ("d", "D")]
    assert sorted(recorder.of("save")) == sorted(recorder.of("compile")) == ["a", "c", "d"]


def test_nothing_is_stored_while_something_is_left_to_lower(monkeypatch):
    recorder, compiled = Recorder(), threading.Event()
    lowerings = recorder.lowerings("a", "b")
    lower_last = lowerings["b"]

    def lower_b():
        assert compiled.wait(PATIENCE)
        return lower_last()

    monkeypatch.setattr(recorder, "note", lambda *event: (Recorder.note(recorder, *event), compiled.set())[0])
    assert Compilation(lowerings | {"b": lower_b}, recorder).result() == {"a": "A", "b": "B"}
    events = recorder.events
    assert events.index(("compile", "a")) < events.index(("lower", "b")) < events.index(("save", "a"))


def test_what_waits_to_be_compiled_leaves_time_to_store(monkeypatch):
    """The only thread compiles the second program, hence is done with the first, until all are lowered."""
    monkeypatch.setattr("jaxserve.runner.compilation.MOST_THREADS", 1)
    recorder, at_second = Recorder(), threading.Event()
    lowerings = recorder.lowerings("a", "b", "c", "d", "e")

    def compile_second():
        at_second.set()
        assert recorder.all_lowered.wait(PATIENCE)
        return "B"

    def lower_third():
        assert at_second.wait(PATIENCE)
        return third()

    third = lowerings["c"]
    lowerings |= {"b": lambda: SimpleNamespace(compile=compile_second), "c": lower_third}
    assert set(Compilation(lowerings, recorder).result().values()) == set("ABCDE")
    assert recorder.events.index(("save", "a")) < recorder.events.index(("lower", "e"))


@pytest.mark.parametrize("fails", ["", "c"])
def test_given_up_it_leaves_no_thread_behind_and_compiles_nothing(fails):
    recorder, threads = Recorder(), threading.active_count()
    making = Compilation(recorder.lowerings("a", "b", "c", fails=fails), recorder)
    if fails:
        with pytest.raises(NotImplementedError) as raised:
            making.result()
        assert raised.value.__notes__ == ["This program cannot be made: c"]
    else:
        making.cancel()
        assert not recorder.of("compile")
        with pytest.raises(concurrent.futures.CancelledError):
            making.result()
    assert threading.active_count() == threads
    assert gc.isenabled()


def test_settings_of_the_one_who_asked_hold_where_programs_are_lowered():
    """JAX keeps them by thread, and stored programs are found by them."""
    seen: list[object] = []

    def lower() -> SimpleNamespace:
        seen.append(jax.config.jax_default_matmul_precision)
        return SimpleNamespace(compile=lambda: "A")

    with jax.default_matmul_precision("highest"):
        making = Compilation({"a": lower}, Recorder())
    assert making.result() == {"a": "A"}
    assert seen == ["highest"]

"""Programs in the making: lowered before they may be compiled, stored when nothing is left to lower, given up whole."""

from __future__ import annotations

import concurrent.futures
import gc
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from jaxserve.runner.compilation import Compilation
from pallas_kernels.mosaic_gpu import launch

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


def lower_with_kernels(recorder: Recorder, name: str, *kernels: str):
    take = launch._taker.get()
    assert take is not None
    for each in kernels:
        take(SimpleNamespace(digest=each))
    return recorder.lowerings(name)[name]()


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_compiled_before_any_program_is_begun(monkeypatch, fails):
    """Once, and also while none is left but programs go on bringing new ones. One that cannot be compiled keeps nobody
    waiting."""
    recorder, done = Recorder(), threading.Event()

    def compile_alone(kernel) -> None:
        recorder.note("kernel", kernel.digest)
        done.set()
        if fails:
            raise RuntimeError(kernel.digest)

    def lower_second():
        assert done.wait(PATIENCE)
        time.sleep(0.1)  # in which the first program could begin
        return lower_with_kernels(recorder, "b", "1", "2")

    monkeypatch.setattr("jaxserve.runner.compilation.compile_alone", compile_alone)
    making = Compilation(
        {
            "a": lambda: lower_with_kernels(recorder, "a", "1"), "b": lower_second,
            "c": lambda: lower_with_kernels(recorder, "c"),
        },
        recorder,
    )  # fmt: skip
    assert set(making.result()) == {"a", "b", "c"}
    happened = [what for what, _ in recorder.events if what in ("kernel", "compile")]
    assert happened == ["kernel"] * 2 + ["compile"] * 3
    assert recorder.of("kernel") == ["1", "2"]
    assert launch._taker.get() is None


def test_given_up_it_waits_for_no_further_kernel(monkeypatch):
    recorder, threads = Recorder(), threading.active_count()
    begun, may_end = threading.Event(), threading.Event()

    def compile_alone(kernel) -> None:
        begun.set()
        assert may_end.wait(PATIENCE)
        recorder.note("kernel", kernel.digest)

    monkeypatch.setattr("jaxserve.runner.compilation.compile_alone", compile_alone)
    making = Compilation({"a": lambda: lower_with_kernels(recorder, "a", *"123456")}, recorder)
    making._may_compile.set()
    assert begun.wait(PATIENCE)
    threading.Timer(0.1, may_end.set).start()
    making.cancel()
    assert recorder.of("kernel") == ["1"]
    assert not recorder.of("compile")
    with pytest.raises(concurrent.futures.CancelledError):
        making.result()
    assert threading.active_count() <= threads + 1  # the timer's


def test_a_kernel_that_cannot_be_begun_fails_the_start(monkeypatch):
    """No thread can be started, say: nobody waits for it."""

    def submit(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    recorder = Recorder()

    def lower():
        monkeypatch.setattr(making._kernels._thread, "submit", submit)
        return lower_with_kernels(recorder, "a", "1")

    ready = threading.Event()
    making = Compilation({"a": lambda: ready.wait(PATIENCE) and lower()}, recorder)
    ready.set()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        making.result()


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

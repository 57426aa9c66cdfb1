"""The on-card check of Hopper attention, without a card: it passes what is right and names what is not."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import card_attention
import jax.numpy as jnp
import pytest
from card_attention import CASES, Case, check
from card_processes import run_cases

from pallas_kernels.dispatch import BlockedBackend

pytestmark = pytest.mark.device

ROWS = [(70, 1), (90, 20)]
SHAPE = (4, 2, 64, 16)


class Wrong(BlockedBackend):
    """The portable backend, which keeps the contract, but for one thing."""

    def __init__(self, what: str):
        super().__init__()
        self.what = what

    def update_and_attend(self, *args, **kwargs):
        out, cache = super().update_and_attend(*args, **kwargs)
        match self.what:
            case "a token":
                out = out.at[20].multiply(1.5)
            case "padding":
                out = out.at[-1, 0, 0].set(1)
            case "a slot nobody wrote":
                cache = cache.at[1, 0, 0, 0, 0].set(0)
            case "rows":
                out = out[:-1]
        return out, cache


@pytest.fixture(autouse=True)
def once(monkeypatch):
    monkeypatch.setattr(card_attention, "REPEATS", 1)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_what_is_right_passes(kv_dtype):
    assert "of the oracle" in check(Case(False, SHAPE, "window-and-cap", kv_dtype), ROWS, BlockedBackend())


@pytest.mark.parametrize(
    "what,said",
    [
        ("a token", "token 20 by 5.0e-01"),
        *(
            pytest.param(what, said, marks=pytest.mark.slow)
            for what, said in {
                "padding": "padding is not zero",
                "a slot nobody wrote": r"1 of the cache's elements differ, as at \[\[1, 0, 0, 0, 0\]\]",
                "rows": "the result is",
            }.items()
        ),
    ],
)
def test_what_is_wrong_is_named(what, said):
    with pytest.raises(AssertionError, match=said):
        check(Case(False, SHAPE, "plain", "bfloat16"), ROWS, Wrong(what))


def test_a_decode_step_has_as_many_tokens_as_rows():
    class Seen(Exception):
        pass

    class Stops(BlockedBackend):
        def update_and_attend(self, q, k, v, cache, metadata, *args):
            assert metadata.decode_only
            raise Seen(q.shape[0], metadata.seq_lens.shape[0])

    with pytest.raises(Seen) as seen:
        check(Case(True, SHAPE, "plain", "bfloat16"), ROWS, Stops())
    assert seen.value.args == (3, 3)


def test_cases_have_names_of_their_own():
    assert len(CASES) == 58
    assert all(name == case.name for name, case in CASES.items())
    assert jnp.dtype("bfloat16") == CASES["mixed 16/1/256/256 plain bfloat16"].kv_dtype


WORKER = """
import os, signal, time
from card_processes import serve_cases
def check(name):
    print("trying", name)
    if name == "dies": os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs": time.sleep(60)
    if name == "raises": raise RuntimeError("misaligned address")
    assert name != "wrong", "differs"
    return "fine"
raise SystemExit(serve_cases(check))
"""


def test_no_case_hides_another():
    names = ["right", "dies", "raises", "also right", "wrong", "right again"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    run = partial(run_cases, [sys.executable, "-u", "-c", WORKER], environment=environment, processes=1)
    reports = run(names=names, seconds=100)
    right = [name for name, each in reports.items() if each.error is None]
    assert right == ["right", "also right", "right again"]
    assert reports["right"].output.endswith("right: fine")
    assert "SIGSEGV" in (reports["dies"].error or "")
    assert "RuntimeError: misaligned address" in (reports["raises"].error or "")
    assert reports["raises"].output == "trying raises"
    assert "AssertionError: differs" in (reports["wrong"].error or "")
    assert "hung" in (run(names=["hangs"], seconds=1)["hangs"].error or "")

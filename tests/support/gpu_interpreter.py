"""Running the Hopper kernels on a CPU: strict interpreter settings, and which races it saw."""

from __future__ import annotations

import re
from typing import Any

import jax
import pytest

MOSAIC_GPU = tuple(int(part) for part in jax.__version__.split(".")[:2]) >= (0, 11)
"""Whether this JAX can lower and interpret the kernels."""

RACES_ARE_PRINTED = tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 12)
"""Later versions raise at the first race, at those that an atomic counter explains: races are looked for before."""

needs_mosaic_gpu = pytest.mark.skipif(not MOSAIC_GPU, reason="Mosaic GPU's interpreter needs jax >= 0.11")

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
"""Compiling what interprets a kernel takes longer than running it."""

COUNTER = ("add_and_fetch", "_merge", "reset")
PARTIAL = ("load_partial", "_load_handed")
"""Functions that use an atomic counter or set it back, and those that read what it orders. The interpreter knows no
atomics: it runs one CTA after another."""


TWICE = "store"
"""What writes a prompt's result to global memory (memory space 0): tokens in two tiles get the same one twice."""


def strict() -> Any:
    """Races detected, reads out of bounds raise, fresh memory is NaN. Needs several CPU devices, hence threads."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(
        detect_races=RACES_ARE_PRINTED, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )


def forbid_copies_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the copy engine raise where it fills up or leaves out what lies outside an array.

    On a card it does neither at a batched array's end: kernels are compiled for more tokens and rows than there are.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    monkeypatch.setattr(gpu_callbacks.AsyncCopyGmemToSmemTask, "out_of_bounds_source_fill", None)
    monkeypatch.setattr(gpu_callbacks.AsyncCopySmemToGmemTask, "clips_out_of_bounds_destination", False)


def unexpected_races(output: str) -> list[str]:
    """Races in what the interpreter printed, but for those an atomic counter orders."""
    races = re.findall(r"RACE DETECTED\n(.*?)\n\n", output + "\n\n", flags=re.DOTALL)
    return [race for race in races if not _ordered([line for line in race.splitlines() if " of " in line])]


def _ordered(accesses: list[str]) -> bool:
    def within(access: str, *functions: str) -> bool:
        return any(f"{name})" in access or f"{name}.<locals>" in access for name in functions)

    def repeats(access: str) -> bool:
        return "write of" in access and "memory_space_id=0" in access and within(access, TWICE)

    if any(within(each, *PARTIAL) for each in accesses) or all(within(each, *COUNTER) for each in accesses):
        return True
    return all(map(repeats, accesses))


def run(function: Any, *args: Any) -> Any:
    """``function(*args)`` jitted, compiled quickly."""
    return jax.jit(function).lower(*args).compile(COMPILER_OPTIONS)(*args)

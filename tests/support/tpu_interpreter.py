"""Running TPU kernels on a CPU: strict interpreter settings, and whether it saw a race."""

from __future__ import annotations

import importlib

from jax.experimental.pallas import tpu as pltpu

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
"""Compiling what interprets a kernel takes longer than running it."""


def strict(cores: int = 1) -> pltpu.InterpretParams:
    """Races detected, reads out of bounds raise, fresh memory is NaN."""
    return pltpu.InterpretParams(
        detect_races=True,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        num_cores_or_threads=cores,
    )


def races_found() -> bool:
    """Whether the interpreter saw a race in the last kernel that it ran with detection on."""
    module = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    return module.races.races_found

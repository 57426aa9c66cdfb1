"""Compiling the programs of a plan with the real TPU compiler, and what the result says: memory, collectives, time."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.runner.program_variants import StepVariant
from jaxserve.runner.programs import StepPrograms
from jaxserve.sampling.metadata import Feature

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ELEMENT_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
}
_OPERATION = re.compile(
    rf"= (?P<shape>\([^=]*?\)|\S+) (?P<kind>{'|'.join(COLLECTIVES)}|ragged-all-to-all)(?:-start)?\("
)
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")


TRACED = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "ragged_all_to_all": "ragged-all-to-all", "ppermute": "collective-permute",
}  # fmt: skip
"""JAX's primitives in the compiler's words."""


@dataclass(frozen=True)
class Collective:
    """Operations of one kind in a program, on one device.

    Args:
        kind: as XLA names it.
        count: how many.
        result_bytes: of their results.
        sent_bytes: what the device sends at least, in a ring; 0 where that is not known.
    """

    kind: str
    count: int
    result_bytes: int
    sent_bytes: int = 0


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler says of one program; bytes are of one device.

    Args:
        name: ``decode`` or ``prefill``.
        num_tokens, num_rows: its bucket, of one rank.
        num_layers: compiled layers, of all or of the first few.
        argument_bytes: weights, caches and the rest of the state, input.
        temporary_bytes: what it needs beside them.
        alias_bytes: of the arguments that results take the place of: nothing that is donated is copied.
    """

    name: str
    num_tokens: int
    num_rows: int
    num_layers: int
    lower_seconds: float
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    flops: float
    collectives: tuple[Collective, ...]


def planned_variants(programs: StepPrograms) -> dict[str, StepVariant]:
    """The largest program for prompts, with the whole sampler, whose temporaries limit the cache; and the largest
    decode step that only takes the argmax."""
    table = programs.builder.table
    decode = StepVariant(table.decode[-1], Feature.NONE, True)
    return {"prefill": StepVariant(table.buckets[-1]), "decode": decode}


def compile_program(
    name: str, programs: StepPrograms, variant: StepVariant, num_layers: int
) -> CompiledProgram:
    """Lower and compile one step.

    Raises:
        jax.errors.JaxRuntimeError: the compiler's own, if it does not fit the device among others.
    """
    started = time.monotonic()
    lowered = programs.lower_step(variant)
    lowered_at = time.monotonic()
    compiled = lowered.compile()
    done = time.monotonic()
    memory = compiled.memory_analysis()
    return CompiledProgram(
        name=name,
        num_tokens=variant.bucket.num_tokens,
        num_rows=variant.bucket.num_rows,
        num_layers=num_layers,
        lower_seconds=lowered_at - started,
        compile_seconds=done - lowered_at,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=_flops(compiled),
        collectives=count_collectives(compiled.as_text()),
    )


def _flops(compiled: jax.stages.Compiled) -> float:
    analysis: Any = compiled.cost_analysis()
    entries: list[dict[str, float]] = analysis if isinstance(analysis, list) else [analysis or {}]
    return sum(entry.get("flops", 0.0) for entry in entries)


def traced_collectives(programs: StepPrograms, variant: StepVariant) -> tuple[Collective, ...]:
    """Collectives of a step as they are written in its program, by kind: nothing is compiled.

    The whole step is one ``shard_map`` whose collectives are explicit, so the compiler adds none; it may join some.
    """
    program, arguments = programs.step(variant)
    mesh = programs.placement.mesh
    found: dict[str, list[int]] = {}
    for equation in _equations(program.trace(*arguments).jaxpr.jaxpr):
        kind = TRACED.get(equation.primitive.name)
        if kind is None or mesh is None:
            continue
        names = equation.params.get("axes") or equation.params.get("axis_name")
        names = (names,) if isinstance(names, str) else names or ()
        size = sum(math.prod(out.aval.shape) * out.aval.dtype.itemsize for out in equation.outvars)
        sent = int(size * _sent_share(kind, math.prod(mesh.shape[name] for name in names)))
        entry = found.setdefault(kind, [0, 0, 0])
        for at, value in enumerate((1, size, sent)):
            entry[at] += value
    return tuple(Collective(kind, *values) for kind, values in sorted(found.items()))


def _sent_share(kind: str, devices: int) -> float:
    """Bytes that a device sends at least, a byte of its result."""
    if kind == "all-reduce":
        return 2 * (devices - 1) / devices
    if kind == "reduce-scatter":
        return devices - 1
    return 1.0 if kind == "collective-permute" else (devices - 1) / devices


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner functions as often as they are called."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else (value,):
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from _equations(inner.jaxpr)


def count_collectives(text: str) -> tuple[Collective, ...]:
    """Collectives of an optimised program's text, by kind; an asynchronous one counts where it starts."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for line in text.splitlines():
        found = _OPERATION.search(line)
        if found is None:
            continue
        counts[found["kind"]] += 1
        sizes[found["kind"]] += max(map(_bytes, _ARRAY.findall(found["shape"])), default=0)
    return tuple(Collective(kind, count, sizes[kind]) for kind, count in sorted(counts.items()))


def _bytes(array: tuple[str, str]) -> int:
    element, dims = array
    size = 1 if element.startswith("f8") else ELEMENT_BYTES.get(element, 0)
    return size * math.prod(int(n) for n in dims.split(",") if n)

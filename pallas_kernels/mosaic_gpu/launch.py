"""Launching a Mosaic GPU kernel that is compiled once for every batch size.

Central idea: a kernel's code depends on a batch's padded sizes only through the leading dimension of its operands,
which a row-major pointer does not know. So each kernel is lowered once, for ``MOST`` tokens and rows, and every step
program calls that same module with its own, smaller arrays. Lowering a kernel costs a second of Python and compiling
it another one that the runtime neither shares between threads nor keeps on disk: with a kernel for every bucket an
engine took two minutes to start.

What a kernel launched like this must do: take the sizes from its operands (never from ``ref.shape[0]`` of a batched
one) and touch nothing past them, since nothing checks the bounds.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

MOST = 1 << 16
"""Tokens or rows that a kernel's operands are declared with; larger batches get a kernel of their own."""

TARGET = "mosaic_gpu_v2"


@dataclass(frozen=True)
class KernelModule:
    """A lowered kernel: the attributes of its custom call."""

    attributes: tuple[tuple[str, bytes | bool], ...]


def launch(
    build: Callable[[Any], Callable[..., Any]],
    key: Hashable,
    operands: Sequence[jax.Array],
    refs: Sequence[Any],
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    batched: Sequence[int],
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Run ``build(out_type)(*operands, *refs)``.

    Args:
        build: makes the kernel (``plgpu.kernel``) for its output types.
        key: what its code depends on beside the types of its arguments.
        operands: arrays that it reads.
        refs: references to arrays that it changes in place.
        out_type: what it returns.
        batched: positions, over operands, refs and outputs, of those whose leading dimension is the batch's.
        interpret: as ``plgpu.kernel`` was given it; then the kernel runs as it is.
    """
    arguments = [*operands, *refs]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*arguments, *out_type)]
    sizes = [types[i].shape[0] for i in batched]
    if interpret is not None or max(sizes, default=0) > MOST:
        return tuple(build(tuple(out_type))(*arguments))
    most = [
        jax.ShapeDtypeStruct((MOST, *t.shape[1:]), t.dtype) if i in batched else t
        for i, t in enumerate(types)
    ]
    num_arguments, num_refs, num_out = len(arguments), len(refs), len(out_type)
    module = _module(build, key, tuple((t.shape, t.dtype) for t in most), num_arguments, num_refs)
    results = jax.ffi.ffi_call(
        TARGET,
        (*types[num_arguments:], *types[len(operands) : num_arguments]),
        input_output_aliases={len(operands) + i: num_out + i for i in range(num_refs)},
    )(*operands, *(ref[...] for ref in refs), **dict(module.attributes))
    for ref, value in zip(refs, results[num_out:], strict=True):
        ref[...] = value
    return tuple(results[:num_out])


class _ModuleCache:
    """Lowered kernels of this process. ``build`` is a closure, so what identifies it is the caller's key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modules: dict[Hashable, KernelModule] = {}

    def get(self, key: Hashable, make: Callable[[], KernelModule]) -> KernelModule:
        with self._lock:
            if key not in self._modules:
                self._modules[key] = make()
            return self._modules[key]


_modules = _ModuleCache()


def _module(
    build: Callable[[Any], Callable[..., Any]],
    key: Hashable,
    types: tuple[Any, ...],
    num_arguments: int,
    num_refs: int,
) -> KernelModule:
    make = functools.partial(_lower, build, types, num_arguments, num_refs)
    return _modules.get((key, types, num_arguments, num_refs), make)


def _lower(
    build: Callable[[Any], Callable[..., Any]], types: tuple[Any, ...], num_arguments: int, num_refs: int
) -> KernelModule:
    """Lower a program of that kernel alone and take the custom call out of it.

    Raises:
        RuntimeError: the program is not one custom call over its arguments in order; JAX has changed.
    """
    abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]
    kernel = build(tuple(abstract[num_arguments:]))

    def program(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        refs = [jax.new_ref(each) for each in arguments[num_arguments - num_refs :]]
        results = kernel(*arguments[: num_arguments - num_refs], *refs)
        return (*results, *(jax.freeze(ref) for ref in refs))

    traced = jax.jit(program).trace(*abstract[:num_arguments])
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    with module.context:
        calls = list(_custom_calls(module.operation))
        if len(calls) != 1:
            raise RuntimeError(
                f"Expected one Mosaic GPU call, found {len(calls)}; this JAX lowers differently."
            )
        [call] = calls
        results = abstract[num_arguments:] + abstract[num_arguments - num_refs : num_arguments]
        expected = [_spelling(t) for t in abstract[:num_arguments]], [_spelling(t) for t in results]
        found = [str(x.type) for x in call.operands], [str(x.type) for x in call.results]
        if found != expected:
            raise RuntimeError(f"Expected a Mosaic GPU call of {expected}, found {found}.")
        config = call.attributes["mhlo.backend_config"]
        attributes = {name: _plain(config[name]) for name in (entry.name for entry in config)}
    return KernelModule(tuple(attributes.items()))


def _custom_calls(operation: Any) -> Any:
    if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == TARGET:
        yield operation
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _custom_calls(inner.operation)


def _plain(attribute: Any) -> bytes | bool:
    return attribute.value_bytes if hasattr(attribute, "value_bytes") else bool(attribute.value)


def _spelling(t: jax.ShapeDtypeStruct) -> str:
    """A type as StableHLO writes it."""
    names = {
        "bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32", "int8": "i8",
        "float8_e4m3fn": "f8E4M3FN",
    }  # fmt: skip
    name = names.get(str(t.dtype), str(t.dtype))
    return f"tensor<{'x'.join([*map(str, t.shape), name])}>"

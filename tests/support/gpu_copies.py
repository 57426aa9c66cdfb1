"""Whether the copy engine's addresses in shared memory are aligned, read from Hopper kernels while they are lowered.

A copy by a tensor map wants a multiple of 128 bytes there, of a swizzled tile 8 lines of its swizzle. Nobody but the
hardware checks that: a kernel that breaks it lowers, compiles and runs interpreted, and on a card it ends the process'
CUDA context with "misaligned address".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

WANTED = 128
"""Bytes."""
ALLOCATION = 1024
"""Bytes that the place of every allocation in shared memory is a multiple of."""
VIEWS = ("memref.cast", "memref.collapse_shape", "memref.expand_shape", "memref.memory_space_cast")
"""Operations that leave a reference where it is."""


@dataclass
class Copies:
    """How many copies were seen, and a line for each whose place is not known to be aligned."""

    seen: int = 0
    misaligned: list[str] = field(default_factory=list)


@contextmanager
def watched_copies(launch: Any) -> Iterator[Copies]:
    """Watch the copies of all kernels lowered inside.

    Args:
        launch: the module ``mosaic_gpu.launch``, whose kernels that were lowered before are lowered again.
    """
    from jax.experimental.mosaic.gpu.launch_context import LaunchContext

    copies, original, lowered = Copies(), LaunchContext.async_copy, launch._modules

    def async_copy(self: Any, *, src_ref: Any, dst_ref: Any, swizzle: Any = None, **kwargs: Any) -> Any:
        [shared] = [each for each in (src_ref, dst_ref) if _memory_space(each) is not None]
        lines = 8 * int(swizzle or 0)
        wanted, found = lines if lines > WANTED else WANTED, alignment(shared)
        copies.seen += 1
        if found % wanted:
            copies.misaligned.append(f"{shared.type} lies at a multiple of {found} bytes, not of {wanted}")
        return original(self, src_ref=src_ref, dst_ref=dst_ref, swizzle=swizzle, **kwargs)

    LaunchContext.async_copy, launch._modules = async_copy, launch._ModuleCache()
    try:
        yield copies
    finally:
        LaunchContext.async_copy, launch._modules = original, lowered


def alignment(ref: Any) -> int:
    """Bytes that a reference into shared memory is known to lie at a multiple of."""
    known = ALLOCATION
    while (operation := _operation(ref)) is not None and operation.name != "memref.view":
        if operation.name == "memref.subview":
            known = math.gcd(known, *_offsets(operation))
        elif operation.name not in VIEWS:
            return 1
        ref = operation.operands[0]
    return known if operation is not None and _multiple(operation.operands[1]) % ALLOCATION == 0 else 1


def _offsets(subview: Any) -> list[int]:
    """Of each dimension, bytes that its part of the offset is a multiple of."""
    from jaxlib.mlir import ir

    source = ir.MemRefType(subview.operands[0].type)
    strides, _ = source.get_strides_and_offset()
    dynamic = iter(subview.operands[1:])  # offsets come first
    bits = source.element_type.width
    found = []
    for offset, stride in zip(subview.attributes["static_offsets"], strides, strict=True):
        static = offset != ir.ShapedType.get_dynamic_stride_or_offset()
        found.append((offset if static else _multiple(next(dynamic))) * stride * bits // 8)
    return found


def _multiple(value: Any) -> int:
    """What an integer is known to be a multiple of; 0 is a multiple of everything."""
    operation = _operation(value)
    if operation is None:
        return 1
    inner = [_multiple(each) for each in operation.operands] if operation.name.startswith("arith.") else []
    match operation.name:
        case "arith.constant":
            return abs(operation.attributes["value"].value)
        case "arith.muli":
            return inner[0] * inner[1]
        case "arith.addi" | "arith.subi":
            return math.gcd(*inner)
        case "arith.index_cast" | "arith.index_castui" | "arith.extui" | "arith.extsi" | "arith.trunci":
            return inner[0]
        case _:
            return 1


def _operation(value: Any) -> Any:
    """What makes a value; None for an argument of a block."""
    from jaxlib.mlir import ir

    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _memory_space(ref: Any) -> Any:
    from jaxlib.mlir import ir

    return ir.MemRefType(ref.type).memory_space

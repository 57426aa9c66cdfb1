"""All-reduce, residual and RMS norm in one kernel (Mosaic GPU): a warpgroup a row, which stays in its registers.

Few tokens' norms are two kernels of XLA's, each as long as its launch. Here the row that a warpgroup adds up is scaled
before it leaves, and both go out: the residual stream, and what the next product takes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.all_reduce import gpu_words as words
from pallas_kernels.all_reduce.gpu_words import THREADS, VECTOR
from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.mosaic_gpu.primitives import store

LONGEST = 8192
"""Elements of a row: 64 a thread, in registers."""


def why_not(row: int, dtype: Any) -> str | None:
    """None where it takes rows of so many elements, else why not."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"{jnp.dtype(dtype).name}: it norms 16-bit types"
    step = THREADS * VECTOR // 2
    return (
        f"rows of {row} elements: it norms multiples of {step} up to {LONGEST}"
        if row % step or row > LONGEST
        else None
    )


@functools.partial(jax.jit, static_argnums=(6, 7, 8, 9))
def all_reduce_norm(
    partial: jax.Array, peers: jax.Array, residual: jax.Array, weights: jax.Array, layer: jax.Array,
    num_rows: jax.Array, eps: float, num_devices: int, capacity: int, num_ctas: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The residual stream [T, M] with the sum added, and its norm times ``weights[layer]`` of [L, M].

    ``layer`` and ``num_rows``, T, are int32[1].
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    sizes, row = (num_devices, capacity, num_ctas), partial.shape[1]
    layout = plgpu.Layout.WG_STRIDED((row,), vec_size=VECTOR // partial.dtype.itemsize)

    def kernel(partial, peers, residual, weights, layer, num_rows, hidden, normal):
        cta = lax.axis_index("cta")
        turns = pl.cdiv(jnp.maximum(num_rows[0] - cta, 0), num_ctas)
        scale = plgpu.load(weights.at[layer[0]], layout=layout, optimized=False)

        def send(turn, _):
            _send(partial, peers, cta + turn * num_ctas, sizes)

        def finish(turn, _):
            at = cta + turn * num_ctas
            before = plgpu.load(residual.at[at], layout=layout, optimized=False).astype(jnp.float32)
            total = _receive(partial, peers, at, sizes, layout).astype(jnp.float32)
            stream = (before + total).astype(partial.dtype)
            store(hidden.at[at], stream)
            wide = stream.astype(jnp.float32)
            mean = jnp.sum(wide * wide) * (1.0 / row)
            store(normal.at[at], (wide * lax.rsqrt(mean + eps)).astype(partial.dtype) * scale)

        lax.fori_loop(0, turns, send, None)
        lax.fori_loop(0, turns, finish, None)
        _end(peers, sizes)

    build = functools.partial(
        plgpu.kernel, kernel, grid=(num_ctas,), grid_names=("cta",), kernel_name="all_reduce_norm",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024),
    )  # fmt: skip
    out = jax.ShapeDtypeStruct(partial.shape, partial.dtype)
    hidden, normal = launch(
        lambda out_type: build(out_type=out_type), ("all_reduce_norm", eps, *sizes),
        [partial, peers, residual, weights, layer, num_rows], [], (out, out), batched=[0, 2, 6, 7],
    )  # fmt: skip
    return hidden, normal


def _send(partial: Any, peers: Any, row: jax.Array, sizes: tuple[int, int, int]) -> None:
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu as plgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def send(ctx: Any, partial: Any, peers: Any, row: Any) -> None:
        del ctx
        call = words.Peers(utils.memref_ptr(peers), *sizes)
        at, starts = _places(partial, row, call.thread)
        source = words.offset(utils.memref_ptr(partial), at)
        mine = [words.load_vector(words.offset(source, start)) for start in starts]
        for place, here in zip(call.sent, call.here, strict=True):
            for start, each in zip(starts, mine, strict=True):
                words.send(words.offset(words.offset(place, at), start), each, here)

    send(partial, peers, row)


def _receive(partial: Any, peers: Any, row: jax.Array, sizes: tuple[int, int, int], layout: Any) -> jax.Array:
    """The devices' sum of a row, rounded."""
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    result = plgpu.ShapeDtypeStruct((partial.shape[1],), partial.dtype, layout=layout)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())), return_type=result
    )
    def receive(ctx: Any, partial: Any, peers: Any, row: Any) -> Any:
        del ctx
        element = ir.MemRefType(partial.type).element_type
        call = words.Peers(utils.memref_ptr(peers), *sizes)
        at, starts = _places(partial, row, call.thread)
        source = words.offset(utils.memref_ptr(partial), at)
        mine = [word for start in starts for word in words.load_vector(words.offset(source, start))]
        totals: list[Any] = []
        for place, here in zip(call.received, call.here, strict=True):
            found = words.receive(words.offset(place, at), mine, here, THREADS * VECTOR)
            values = [words.widen(found[4 * i : 4 * i + 4], element) for i in range(len(starts))]
            totals = [arith.addf(a, b) for a, b in zip(totals, values, strict=True)] if totals else values
        registers = [words.round_to(total, element) for total in totals]
        return FragmentedArray(
            _registers=np.array(registers, object), _layout=layout.to_mgpu(), _is_signed=None
        )

    return receive(partial, peers, row)


def _end(peers: Any, sizes: tuple[int, int, int]) -> None:
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu as plgpu

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def end(ctx: Any, peers: Any) -> None:
        del ctx
        words.Peers(utils.memref_ptr(peers), *sizes).end()

    end(peers)


def _places(partial: Any, row: Any, thread: Any) -> tuple[Any, list[int]]:
    """Where this thread's part of a row begins, and its vectors from there on, in bytes."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    kind = ir.MemRefType(partial.type)
    length = kind.shape[1] * kind.element_type.width // 8
    begin = arith.muli(words.wide(row.registers.item()), words.i64_of(length))
    at = arith.addi(begin, words.wide(arith.muli(thread, words.i32_of(VECTOR))))
    return at, list(range(0, length, THREADS * VECTOR))

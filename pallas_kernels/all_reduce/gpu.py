"""All-reduce in one shot over NVLink (Mosaic GPU): plain loads and stores of peers' memory, one kernel, no flags.

Central idea: every device writes its partial result straight into memory of its peers, who wait for each word of it.
A word that has not come yet reads ``NOTHING``, a pair of NaNs that no partial result is sent as, so that neither
flags nor fences are needed: the wait for data is the wait for the peer. Whoever has read a word puts ``NOTHING`` back.

Two areas take turns. A device that is in call n + 2 has ended call n + 1, hence got what all peers sent in n + 1,
which they do after they ended call n, where they read and cleared the area that n + 2 writes.

What this asks of a program: all devices make the same calls in the same order, one at a time. Calls that depend on
each other, as those of a model's layers do, are in order. A program also has one of XLA's own collectives: where there
is none, XLA starts a device while another one still loads its kernels or makes its CUDA graph, and these may wait for
kernels that run. The memory (``workspace``) belongs to no program: a program gets nothing but the addresses, so XLA can
neither move nor copy it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp

from pallas_kernels.all_reduce import gpu_norm
from pallas_kernels.all_reduce import gpu_words as words
from pallas_kernels.all_reduce.gpu_words import THREADS, VECTOR
from pallas_kernels.all_reduce.layout import MOST_BLOCKS
from pallas_kernels.mosaic_gpu.launch import launch

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class GpuAllReduce:
    """The kernel. Stateless; static in the compiled step.

    Args:
        num_devices: that add up, 2 to 8.
        capacity: bytes that a partial result has at most, a multiple of 16.
        blocks: (bytes at most, CTAs) for partial results of different sizes, ascending; the last serves the rest.
        norm_bytes: partial results of at most so many are normed in the same kernel.
    """

    num_devices: int
    capacity: int
    blocks: tuple[tuple[int, int], ...]
    norm_bytes: int = 0

    name = "mosaic_gpu"

    def __post_init__(self) -> None:
        if not 2 <= self.num_devices <= 8:
            raise ValueError(f"num_devices is {self.num_devices}: it adds up 2 to 8 devices' results.")
        if self.capacity % VECTOR or self.capacity <= 0:
            raise ValueError(f"capacity is {self.capacity}: bytes in pieces of {VECTOR}, at least one.")
        bad = [count for _, count in self.blocks if not 4 <= count <= MOST_BLOCKS]
        if bad or not self.blocks:
            raise ValueError(f"blocks is {self.blocks}: pairs with 4 to {MOST_BLOCKS} CTAs.")

    def why_not(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        """None where it adds up arrays of that shape, else why not."""
        dtype = jnp.dtype(dtype)
        if dtype.name not in DTYPES:
            return f"{dtype.name}: it adds {', '.join(DTYPES)}"
        size = dtype.itemsize * math.prod(shape)
        if not 0 < size <= self.capacity:
            return f"{size} bytes: it takes 1 to {self.capacity}"
        if size % VECTOR:
            return f"{size} bytes: it takes multiples of {VECTOR}"
        return None

    def __call__(
        self, partial: jax.Array, peers: jax.Array | None, residual: jax.Array | None = None
    ) -> jax.Array:
        """The sum of the devices' [T, M], added in their order in float32 and rounded; then, rounded again, a residual.

        Args:
            partial: this device's.
            residual: the same on all devices, of the same shape and type.
            peers: int32[1 + 2 * num_devices]: this device's place among them, and low and high half of the address
                of each one's workspace (``workspace.Workspaces.peers``).

        Raises:
            ValueError: of ``why_not``, peers of another number, a residual of another shape.
        """
        table = self._checked(partial, peers, residual)
        return _all_reduce(partial, table, residual, self.num_devices, self.capacity, self._ctas_for(partial))

    def why_not_norm(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        """None where ``with_norm`` takes arrays of that shape, else why not."""
        size = jnp.dtype(dtype).itemsize * math.prod(shape)
        if size > self.norm_bytes:
            return f"{size} bytes: it norms up to {self.norm_bytes}"
        return self.why_not(shape, dtype) or gpu_norm.why_not(shape[-1], dtype)

    def with_norm(
        self, partial: jax.Array, peers: jax.Array | None, residual: jax.Array, weight: jax.Array, eps: float,
        layer: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """The sum with the residual added, as a call returns it, and that stream's RMS norm times ``weight`` [M].

        With a ``layer``, int32[1], ``weight`` is [L, M], and this is the one.

        Raises:
            ValueError: of ``why_not_norm``, and as a call does.
        """
        if (why := self.why_not_norm(partial.shape, partial.dtype)) is not None:
            raise ValueError(f"This all-reduce cannot norm {why}.")
        table, rows = self._checked(partial, peers, residual), jnp.full((1,), partial.shape[0], jnp.int32)
        return gpu_norm.all_reduce_norm(
            partial, table, residual, weight[None] if layer is None else weight,
            jnp.zeros(1, jnp.int32) if layer is None else layer, rows, eps, self.num_devices, self.capacity,
            self._ctas_for(partial),
        )  # fmt: skip

    def _checked(self, partial: jax.Array, peers: jax.Array | None, residual: jax.Array | None) -> jax.Array:
        """The peers, if all of that fits together."""
        if (why := self.why_not(partial.shape, partial.dtype)) is not None:
            raise ValueError(f"This all-reduce cannot take {why}.")
        if peers is None:
            raise ValueError("This all-reduce has no table of peers: trace the program in `reaching(peers)`.")
        if peers.shape != (1 + 2 * self.num_devices,):
            raise ValueError(f"peers is of shape {peers.shape}, not {(1 + 2 * self.num_devices,)}.")
        if residual is not None and (residual.shape, residual.dtype) != (partial.shape, partial.dtype):
            raise ValueError(
                f"The residual is {residual.dtype}{residual.shape}, what it is added to {partial.dtype}{partial.shape}."
            )
        return peers

    def _ctas_for(self, partial: jax.Array) -> int:
        size = partial.size * partial.dtype.itemsize
        return next((count for most, count in self.blocks if size <= most), self.blocks[-1][1])


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _all_reduce(
    partial: jax.Array, peers: jax.Array, residual: jax.Array | None, num_devices: int, capacity: int, num_ctas: int
) -> jax.Array:  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def all_reduce(partial, peers, num_vectors, *arrays):
        _emit(partial, peers, num_vectors, *arrays, sizes=(num_devices, capacity, num_ctas))

    build = functools.partial(
        plgpu.kernel, all_reduce, grid=(num_ctas,), grid_names=("cta",), kernel_name="all_reduce"
    )
    vectors = jnp.full((1,), partial.size * partial.dtype.itemsize // VECTOR, jnp.int32)
    extra = [] if residual is None else [residual]
    (out,) = launch(
        lambda out_type: build(out_type=out_type), ("all_reduce", num_devices, capacity, num_ctas),
        [partial, peers, vectors, *extra], [], (jax.ShapeDtypeStruct(partial.shape, partial.dtype),),
        batched=[0, *range(3, 4 + len(extra))],
    )  # fmt: skip
    return out


def _emit(partial: Any, peers: Any, num_vectors: Any, *arrays: Any, sizes: tuple[int, int, int]) -> None:
    """The kernel's body, of references in global memory; ``arrays`` are the residual, if there is one, and the sum."""
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, scf

    num_ctas = sizes[-1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (3 + len(arrays)))
    def body(ctx: Any, partial: Any, peers: Any, num_vectors: Any, *arrays: Any) -> None:
        del ctx
        index, i64 = ir.IndexType.get(), ir.IntegerType.get_signless(64)
        element = ir.MemRefType(partial.type).element_type
        source = utils.memref_ptr(partial)
        *residual, result = (utils.memref_ptr(each) for each in arrays)
        count = words.load(utils.memref_ptr(num_vectors))
        call = words.Peers(utils.memref_ptr(peers), *sizes)
        first = arith.addi(arith.muli(call.cta, words.i32_of(THREADS)), call.thread)
        bounds = [arith.index_cast(index, each) for each in (first, count, words.i32_of(num_ctas * THREADS))]

        loop = scf.ForOp(*bounds)
        with ir.InsertionPoint(loop.body):
            at = arith.muli(arith.index_cast(i64, loop.induction_variable), words.i64_of(VECTOR))
            mine = words.load_vector(words.offset(source, at))
            for place, here in zip(call.sent, call.here, strict=True):
                words.send(words.offset(place, at), mine, here)
            scf.yield_([])
        loop = scf.ForOp(*bounds)
        with ir.InsertionPoint(loop.body):
            at = arith.muli(arith.index_cast(i64, loop.induction_variable), words.i64_of(VECTOR))
            mine = words.load_vector(words.offset(source, at))
            more = [words.load_vector(words.offset(each, at)) for each in residual]
            total = None
            for place, here in zip(call.received, call.here, strict=True):
                value = words.widen(words.receive(words.offset(place, at), mine, here, VECTOR), element)
                total = value if total is None else arith.addf(total, value)
            for each in more:
                rounded = words.widen(words.narrow(total, element), element)
                total = arith.addf(words.widen(each, element), rounded)
            words.store_vector(words.offset(result, at), words.narrow(total, element))
            scf.yield_([])
        call.end()

    body(partial, peers, num_vectors, *arrays)

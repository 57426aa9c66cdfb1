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
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp

from pallas_kernels.all_reduce.layout import COUNTER_BYTES, MOST_BLOCKS, NAN, NOTHING
from pallas_kernels.ragged_paged_attention.gpu_launch import launch

THREADS = 128
VECTOR = 16
"""Bytes that a thread moves at once."""
PATIENCE = 1 << 27
"""Reads (0.2 us or more each) before a device stops with an error: its peers made other calls, or none."""
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class GpuAllReduce:
    """The kernel. Stateless; static in the compiled step.

    Args:
        num_devices: that add up, 2 to 8.
        capacity: bytes that a partial result has at most, a multiple of 16.
        blocks: (bytes at most, CTAs) for partial results of different sizes, ascending; the last serves the rest.
    """

    num_devices: int
    capacity: int
    blocks: tuple[tuple[int, int], ...]

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
        size = dtype.itemsize * functools.reduce(lambda a, b: a * b, shape, 1)
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
        size = partial.size * partial.dtype.itemsize
        count = next((count for most, count in self.blocks if size <= most), self.blocks[-1][1])
        return _all_reduce(partial, peers, residual, self.num_devices, self.capacity, count)


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
    from jaxlib.mlir.dialects import arith, gpu, scf

    num_devices, capacity, num_ctas = sizes

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (3 + len(arrays)))
    def body(ctx: Any, partial: Any, peers: Any, num_vectors: Any, *arrays: Any) -> None:
        del ctx
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        element = ir.MemRefType(partial.type).element_type
        table, source = utils.memref_ptr(peers), utils.memref_ptr(partial)
        *residual, result = (utils.memref_ptr(each) for each in arrays)
        cta = arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        count = _load(utils.memref_ptr(num_vectors))
        rank = _load(table)
        bases = [_load_address(_offset(table, 4 + 8 * peer)) for peer in range(num_devices)]
        own = _pick(bases, rank)
        calls = _load(_offset(own, arith.muli(cta, _i32(4))))
        utils.warpgroup_barrier()  # all threads have read the counter
        turn = arith.andi(calls, _i32(1))
        area = _wide(arith.muli(turn, _i32(num_devices)))
        here = [arith.cmpi(arith.CmpIPredicate.eq, rank, _i32(peer)) for peer in range(num_devices)]

        def slot(base: Any, sender: Any) -> Any:
            place = arith.muli(arith.addi(area, _wide(sender)), _i64(capacity))
            return _offset(_offset(base, COUNTER_BYTES), place)

        first = arith.addi(arith.muli(cta, _i32(THREADS)), thread)
        bounds = [arith.index_cast(index, each) for each in (first, count, _i32(num_ctas * THREADS))]
        sent = [slot(base, rank) for base in bases]
        received = [slot(own, _i32(peer)) for peer in range(num_devices)]

        loop = scf.ForOp(*bounds)
        with ir.InsertionPoint(loop.body):
            at = _bytes(loop.induction_variable)
            words = [_sendable(word) for word in _load_vector(_offset(source, at))]
            for peer in range(num_devices):
                _send(_offset(sent[peer], at), words, here[peer])
            scf.yield_([])
        loop = scf.ForOp(*bounds)
        with ir.InsertionPoint(loop.body):
            at = _bytes(loop.induction_variable)
            mine = _load_vector(_offset(source, at))
            more = [_load_vector(_offset(each, at)) for each in residual]
            total = None
            for peer in range(num_devices):
                value = _widen(_receive(_offset(received[peer], at), mine, here[peer]), element)
                total = value if total is None else arith.addf(total, value)
            for each in more:
                total = arith.addf(_widen(each, element), _widen(_narrow(total, element), element))
            _store_vector(_offset(result, at), _narrow(total, element))
            scf.yield_([])
        _store_counters(own, cta, thread, arith.addi(calls, _i32(1)), num_ctas)

    body(partial, peers, num_vectors, *arrays)


def _i32(value: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IntegerType.get_signless(32), value)


def _i64(value: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IntegerType.get_signless(64), value)


def _wide(value: Any) -> Any:
    """int32, not negative, to int64."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.extui(ir.IntegerType.get_signless(64), value)


def _bytes(vector: Any) -> Any:
    """Where a vector lies: int64 bytes."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.muli(arith.index_cast(ir.IntegerType.get_signless(64), vector), _i64(VECTOR))


def _offset(base: Any, num_bytes: Any) -> Any:
    """A pointer so many bytes further: an int, or a value of any integer type."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    return utils.getelementptr(base, [num_bytes], ir.IntegerType.get_signless(8))


def _pick(pointers: list[Any], place: Any) -> Any:
    """The pointer at ``place``."""
    from jaxlib.mlir.dialects import arith

    picked = pointers[0]
    for i, pointer in enumerate(pointers[1:], 1):
        picked = arith.select(arith.cmpi(arith.CmpIPredicate.eq, place, _i32(i)), pointer, picked)
    return picked


def _load(pointer: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    return llvm.inline_asm(
        ir.IntegerType.get_signless(32), [pointer], "ld.global.b32 $0, [$1];", "=r,l", has_side_effects=True
    )


def _load_address(pointer: Any) -> Any:
    """A pointer that lies in two int32, low half first."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    low, high = _wide(_load(pointer)), _wide(_load(_offset(pointer, 4)))
    address = arith.ori(low, arith.shli(high, _i64(32)))
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr"), address)


def _store_counters(base: Any, cta: Any, thread: Any, value: Any, num_ctas: int) -> None:
    """Count a call in the counters of all CTAs that a call may have: each CTA those of its own residue."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    place = arith.addi(arith.muli(thread, _i32(num_ctas)), cta)
    exists = arith.cmpi(arith.CmpIPredicate.ult, place, _i32(MOST_BLOCKS))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [_offset(base, arith.muli(place, _i32(4))), value, _flag(exists)],
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1; }", "l,r,r", has_side_effects=True,
    )  # fmt: skip


def _flag(value: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.extui(ir.IntegerType.get_signless(32), value)


def _sendable(word: Any) -> Any:
    from jaxlib.mlir.dialects import arith

    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, word, _i32(NOTHING)), _i32(NAN), word)


def _words(struct: Any) -> list[Any]:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    i32 = ir.IntegerType.get_signless(32)
    return [llvm.extractvalue(i32, struct, ir.DenseI64ArrayAttr.get([i])) for i in range(4)]


def _four() -> Any:
    from jaxlib.mlir import ir

    return ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")


def _load_vector(pointer: Any) -> list[Any]:
    from jaxlib.mlir.dialects import llvm

    code = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return _words(llvm.inline_asm(_four(), [pointer], code, "=r,=r,=r,=r,l", has_side_effects=True))


def _store_vector(pointer: Any, words: list[Any]) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    code = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [pointer, *words], code, "l,r,r,r,r", has_side_effects=True)


def _send(pointer: Any, words: list[Any], unless: Any) -> None:
    """Store to a peer's memory, each word on its own: none of them waits for another."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    code = """{
        .reg .pred skip;
        setp.ne.b32 skip, $5, 0;
        @!skip st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};
    }"""
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), [pointer, *words, _flag(unless)], code, "l,r,r,r,r,r", has_side_effects=True
    )  # fmt: skip


def _receive(pointer: Any, mine: list[Any], unless: Any) -> list[Any]:
    """Wait for four words of a peer and clear their place; or take this device's own."""
    from jaxlib.mlir.dialects import llvm

    code = f"""{{
        .reg .pred skip, wait, again;
        .reg .b32 turns, nothing;
        mov.b32 $0, $5;
        mov.b32 $1, $6;
        mov.b32 $2, $7;
        mov.b32 $3, $8;
        mov.b32 turns, 0;
        mov.b32 nothing, {NOTHING};
        setp.ne.b32 skip, $9, 0;
        @skip bra DONE;
    READ:
        ld.relaxed.sys.global.v4.b32 {{$0, $1, $2, $3}}, [$4];
        setp.eq.b32 wait, $0, nothing;
        setp.eq.or.b32 wait, $1, nothing, wait;
        setp.eq.or.b32 wait, $2, nothing, wait;
        setp.eq.or.b32 wait, $3, nothing, wait;
        @!wait bra CLEAR;
        add.u32 turns, turns, 1;
        setp.lt.u32 again, turns, {PATIENCE};
        @again bra READ;
        trap;
    CLEAR:
        st.relaxed.sys.global.v4.b32 [$4], {{nothing, nothing, nothing, nothing}};
    DONE:
    }}"""
    constraints = "=&r,=&r,=&r,=&r,l,r,r,r,r,r"
    operands = [pointer, *mine, _flag(unless)]
    return _words(llvm.inline_asm(_four(), operands, code, constraints, has_side_effects=True))


def _vector(words: list[Any]) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    return vector.from_elements(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)), words)


def _widen(words: list[Any], element: Any) -> Any:
    """Four words as a vector of float32."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    length, f32 = VECTOR * 8 // element.width, ir.F32Type.get()
    values = vector.bitcast(ir.VectorType.get((length,), element), _vector(words))
    return values if element == f32 else arith.extf(ir.VectorType.get((length,), f32), values)


def _narrow(values: Any, element: Any) -> list[Any]:
    """A vector of float32, rounded, as four words."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    i32 = ir.IntegerType.get_signless(32)
    length = ir.VectorType(values.type).shape[0]
    if element != ir.F32Type.get():
        values = arith.truncf(ir.VectorType.get((length,), element), values)
    words = vector.bitcast(ir.VectorType.get((4,), i32), values)
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]

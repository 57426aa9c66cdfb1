"""Results in registers to and from global memory in Mosaic GPU: partial ones as they lie, and whole ones at once.

Central idea: a warpgroup that stores what another one of the same kernel loads need not care for the order of the
elements. Each thread stores the registers it holds, 16 bytes at a time, and threads whose columns are padding store
nothing. No shared memory, no copy engine, so no wait but the one for memory.

Where half of eight columns are padding, a state can be loaded and stored in halves: columns 4 to 7 then hold the second
half of the rows of columns 0 to 3, and no thread is idle.

Everything here has a plain counterpart for the interpreter, which knows no inline code (``compiled=False``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mosaic_gpu.primitives import store

State = tuple[jax.Array, jax.Array, jax.Array]
"""Of an online softmax: running maximum [columns], denominator [columns], weighted values [M, columns]."""


def save_partial(acc_ref: Any, stat_ref: Any, state: State, columns_used: int, *, compiled: bool) -> None:
    """Leave a state in global memory for ``load_partial``.

    Args:
        acc_ref, stat_ref: [M, columns] and [2, columns] float32 references in one piece; columns 8 or 16, M a multiple
            of 64.
        columns_used: how many of the columns matter.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    top, total, acc = state
    if not compiled:
        store(acc_ref, acc)
        store(stat_ref.at[0], top)
        store(stat_ref.at[1], total)
        return
    from jaxlib.mlir.dialects import arith

    column_layout = plgpu.Layout.WGMMA.reduce(0)
    types = (plgpu.RefType(), plgpu.RefType(), column_layout, column_layout, plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=types)
    def save(ctx: Any, acc_ref: Any, stat_ref: Any, top: Any, total: Any, acc: Any) -> None:
        del ctx
        lane = _Lane(acc.shape[1], columns_used)
        values, tops, totals = (_elements(each) for each in (acc, top, total))
        for i in range(len(values) // 4):
            _store_four(acc_ref, lane.place(i), values[4 * i : 4 * i + 4], lane.is_used())
        first = arith.andi(lane.is_used(), arith.cmpi(arith.CmpIPredicate.ult, lane.thread, _i32(4)))
        for i in range(len(tops) // 2):
            four = [*tops[2 * i : 2 * i + 2], *totals[2 * i : 2 * i + 2]]
            _store_four(stat_ref, lane.stat_place(i), four, first)

    save(acc_ref, stat_ref, top, total, acc)


def load_partial(
    acc_ref: Any, stat_ref: Any, shape: tuple[int, int], columns_used: int, exists: jax.Array, *, halves: bool,
    compiled: bool,
) -> State:  # fmt: skip
    """What ``save_partial`` left in this shape; anything in columns that do not matter.

    Args:
        exists: whether it is wanted; something finite, without a load, if not.
        halves: load it in halves: [M / 2, 8], M a multiple of 128, of at most 4 columns that matter.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    column_layout = plgpu.Layout.WGMMA.reduce(0)
    if not compiled:
        top, total = (plgpu.load(stat_ref.at[i], layout=column_layout, optimized=False) for i in range(2))
        acc = plgpu.load(acc_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        if halves:
            top, total = (jnp.concatenate([x[:4], x[:4]]) for x in (top, total))
            acc = jnp.concatenate([acc[: shape[0] // 2, :4], acc[shape[0] // 2 :, :4]], axis=1)
        return top, total, acc
    num_fours = shape[0] * shape[1] // 512
    if halves:
        shape, num_fours = (shape[0] // 2, shape[1]), num_fours // 2
    stat_type = plgpu.ShapeDtypeStruct(shape[1:], jnp.float32, layout=column_layout)
    acc_type = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=(stat_type, stat_type, acc_type),
    )
    def load(ctx: Any, acc_ref: Any, stat_ref: Any, exists: Any) -> Any:
        del ctx
        flag = exists.registers.item()
        lane = _Lane(shape[1], columns_used, halves)
        tops, totals, values = [], [], []
        for i in range(num_fours):
            values += _load_four(acc_ref, lane.place(i, num_fours), flag)
        for i in range(shape[1] // 8):
            four = _load_four(stat_ref, lane.stat_place(i), flag)
            tops, totals = tops + four[:2], totals + four[2:]
        return tuple(_array(x, t) for x, t in ((tops, stat_type), (totals, stat_type), (values, acc_type)))

    return load(acc_ref, stat_ref, exists.astype(jnp.int32))


def store_columns(out_ref: Any, value: jax.Array, *, halves: bool = False, compiled: bool) -> None:
    """Store the first columns of ``value``, as rows.

    Straight from the registers, 2 bytes at a time: for little that must leave at once.

    Args:
        out_ref: [columns that matter, M] reference to a 16-bit type, in one piece in global memory.
        value: [M, columns] of that type; in halves [M / 2, 8].
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not compiled:
        if halves:
            value = jnp.concatenate([value[:, :4], value[:, 4:]], axis=0)
        store(out_ref, value[:, : out_ref.shape[0]].T)
        return
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def put(ctx: Any, out_ref: Any, value: Any) -> None:
        del ctx
        i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
        used, num_rows = ir.MemRefType(out_ref.type).shape
        base = utils.memref_ptr(out_ref)
        elements = iter(_elements(value))
        for row, column in value.layout.thread_idxs(value.shape):
            row, column = arith.index_cast(i32, row), arith.index_cast(i32, column)
            for i in range(value.layout.vector_length):
                element, place = next(elements), arith.addi(column, _i32(i))
                offset = row
                if halves:
                    offset = arith.addi(row, arith.muli(arith.shrui(place, _i32(2)), _i32(num_rows // 2)))
                    place = arith.andi(place, _i32(3))
                at = arith.addi(arith.muli(place, _i32(num_rows)), offset)
                exists = arith.cmpi(arith.CmpIPredicate.ult, place, _i32(used))
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [utils.getelementptr(base, [at], element.type), arith.bitcast(i16, element), _flag(exists)],
                    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b16 [$0], $1; }", "l,h,r",
                    has_side_effects=True,
                )  # fmt: skip

    put(out_ref, value)


class _Lane:
    """Where this thread's part of a partial result lies, in float32 elements.

    Four neighbouring threads hold two of eight columns each. One with padding reads what a neighbour reads, or in
    halves that neighbour's second half.
    """

    def __init__(self, columns: int, columns_used: int, halves: bool = False):
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir.dialects import arith

        self.thread = arith.remui(utils.thread_idx(), _i32(128))
        self.pair = arith.andi(self.thread, _i32(3))
        self.pairs_used = min(-(-columns_used // 2), 4) if columns == 8 else 4
        pair = arith.andi(self.pair, _i32(1)) if halves else self.pair
        self.read_pair = arith.remui(pair, _i32(self.pairs_used))
        self.half = arith.shrui(self.pair, _i32(1)) if halves else None

    def is_used(self) -> Any:
        from jaxlib.mlir.dialects import arith

        return arith.cmpi(arith.CmpIPredicate.ult, self.pair, _i32(self.pairs_used))

    def place(self, i: int, fours_in_half: int = 0) -> Any:
        """Of the i-th four values (of this thread's half)."""
        from jaxlib.mlir.dialects import arith

        thread = arith.addi(arith.subi(self.thread, self.pair), self.read_pair)
        if self.half is not None:
            thread = arith.addi(thread, arith.muli(self.half, _i32(128 * fours_in_half)))
        return arith.muli(arith.addi(thread, _i32(128 * i)), _i32(4))

    def stat_place(self, i: int) -> Any:
        """Of two maxima and two denominators of the i-th eight columns."""
        from jaxlib.mlir.dialects import arith

        return arith.muli(arith.addi(self.read_pair, _i32(4 * i)), _i32(4))


def _i32(value: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IntegerType.get_signless(32), value)


def _flag(predicate: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.extui(ir.IntegerType.get_signless(32), predicate)


def _elements(array: Any) -> list[Any]:
    """The scalars that a thread holds of a fragmented array."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    def at(i: int) -> Any:
        return ir.DenseI64ArrayAttr.get([i])

    return [
        vector.extract(register, dynamic_position=[], static_position=at(i))
        for register in array.registers.flat
        for i in range(array.layout.vector_length)
    ]


def _array(scalars: list[Any], like: Any) -> Any:
    """The fragmented float32 array of which a thread holds these scalars."""
    from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    layout = like.layout.to_mgpu()
    length = layout.vector_length
    register_type = ir.VectorType.get((length,), ir.F32Type.get())
    registers = np.empty(layout.registers_shape(like.shape), dtype=object)
    for i, place in enumerate(np.ndindex(registers.shape)):
        registers[place] = vector.from_elements(register_type, scalars[i * length : (i + 1) * length])
    return FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _address(ref: Any, place: Any) -> Any:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    return utils.getelementptr(utils.memref_ptr(ref), [place], ir.F32Type.get())


def _store_four(ref: Any, place: Any, four: list[Any], predicate: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), [_address(ref, place), *four, _flag(predicate)],
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; @p st.global.v4.f32 [$0], {$1, $2, $3, $4}; }", "l,f,f,f,f,r",
        has_side_effects=True,
    )  # fmt: skip


def _load_four(ref: Any, place: Any, flag: Any) -> list[Any]:
    """16 bytes past the first-level cache, which does not see what other multiprocessors store; or zeros."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    f32 = ir.F32Type.get()
    four = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4), [_address(ref, place), flag],
        "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; "
        "mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000; @p ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4]; }",
        "=f,=f,=f,=f,l,r", has_side_effects=True,
    )  # fmt: skip
    return [llvm.extractvalue(f32, four, [i]) for i in range(4)]

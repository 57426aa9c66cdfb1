"""What the all-reduce kernels are made of: the table of peers, words sent to them, words waited for.

All of it is emitted into inline Mosaic GPU code, for every thread of one warpgroup.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.all_reduce.layout import COUNTER_BYTES, MOST_BLOCKS, NAN, NOTHING

THREADS = 128
VECTOR = 16
"""Bytes that a thread moves at once."""
PATIENCE = 1 << 27
"""Reads (0.2 us or more each) before a device stops with an error: its peers made other calls, or none."""


class Peers:
    """This device and its peers in the call that is being made.

    Attributes:
        here: for each device, whether it is this one.
        sent: for each device, where it finds what this one sends.
        received: for each device, where this one finds what that one sends.

    Args:
        table: pointer to the table of peers.
        num_devices, capacity: of the workspaces.
        num_ctas: of the call.
    """

    def __init__(self, table: Any, num_devices: int, capacity: int, num_ctas: int) -> None:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, gpu

        i32 = ir.IntegerType.get_signless(32)
        self.num_ctas = num_ctas
        self.cta = arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))
        self.thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        rank = load(table)
        bases = [load_address(offset(table, 4 + 8 * peer)) for peer in range(num_devices)]
        self._own = pick(bases, rank)
        self._calls = load(offset(self._own, arith.muli(self.cta, i32_of(4))))
        turn = wide(arith.muli(arith.andi(self._calls, i32_of(1)), i32_of(num_devices)))

        def slot(base: Any, sender: Any) -> Any:
            place = arith.muli(arith.addi(turn, wide(sender)), i64_of(capacity))
            return offset(offset(base, COUNTER_BYTES), place)

        self.here = [arith.cmpi(arith.CmpIPredicate.eq, rank, i32_of(peer)) for peer in range(num_devices)]
        self.sent = [slot(base, rank) for base in bases]
        self.received = [slot(self._own, i32_of(peer)) for peer in range(num_devices)]

    def end(self) -> None:
        """Count the call, once no thread of the CTA will read the counter again.

        Other calls may have more CTAs, hence more counters: each CTA sets those of its own residue.
        """
        from jax.experimental.mosaic.gpu import utils
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        utils.warpgroup_barrier()
        place = arith.addi(arith.muli(self.thread, i32_of(self.num_ctas)), self.cta)
        exists = arith.cmpi(arith.CmpIPredicate.ult, place, i32_of(MOST_BLOCKS))
        calls = arith.addi(self._calls, i32_of(1))
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [offset(self._own, arith.muli(place, i32_of(4))), calls, _flag(exists)],
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1; }", "l,r,r", has_side_effects=True,
        )  # fmt: skip


def i32_of(value: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IntegerType.get_signless(32), value)


def i64_of(value: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IntegerType.get_signless(64), value)


def wide(value: Any) -> Any:
    """int32, not negative, to int64."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.extui(ir.IntegerType.get_signless(64), value)


def offset(base: Any, num_bytes: Any) -> Any:
    """A pointer so many bytes further: an int, or a value of any integer type."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir

    return utils.getelementptr(base, [num_bytes], ir.IntegerType.get_signless(8))


def pick(pointers: list[Any], place: Any) -> Any:
    """The pointer at ``place``."""
    from jaxlib.mlir.dialects import arith

    picked = pointers[0]
    for i, pointer in enumerate(pointers[1:], 1):
        picked = arith.select(arith.cmpi(arith.CmpIPredicate.eq, place, i32_of(i)), pointer, picked)
    return picked


def load(pointer: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    return llvm.inline_asm(
        ir.IntegerType.get_signless(32), [pointer], "ld.global.b32 $0, [$1];", "=r,l", has_side_effects=True
    )


def load_address(pointer: Any) -> Any:
    """A pointer that lies in two int32, low half first."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    low, high = wide(load(pointer)), wide(load(offset(pointer, 4)))
    address = arith.ori(low, arith.shli(high, i64_of(32)))
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr"), address)


def _flag(value: Any) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.extui(ir.IntegerType.get_signless(32), value)


def sendable(word: Any) -> Any:
    from jaxlib.mlir.dialects import arith

    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, word, i32_of(NOTHING)), i32_of(NAN), word)


def _words(struct: Any, count: int = 4) -> list[Any]:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    i32 = ir.IntegerType.get_signless(32)
    return [llvm.extractvalue(i32, struct, ir.DenseI64ArrayAttr.get([i])) for i in range(count)]


def _four() -> Any:
    from jaxlib.mlir import ir

    return ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")


def load_vector(pointer: Any) -> list[Any]:
    from jaxlib.mlir.dialects import llvm

    code = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    return _words(llvm.inline_asm(_four(), [pointer], code, "=r,=r,=r,=r,l", has_side_effects=True))


def store_vector(pointer: Any, words: list[Any]) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    code = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [pointer, *words], code, "l,r,r,r,r", has_side_effects=True)


def send(pointer: Any, words: list[Any], unless: Any) -> None:
    """Store to a peer's memory, each word on its own: none of them waits for another."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    words = [sendable(word) for word in words]
    code = """{
        .reg .pred skip;
        setp.ne.b32 skip, $5, 0;
        @!skip st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};
    }"""
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"), [pointer, *words, _flag(unless)], code, "l,r,r,r,r,r", has_side_effects=True
    )  # fmt: skip


def receive(pointer: Any, mine: list[Any], unless: Any, stride: int) -> list[Any]:
    """Wait for a peer's words and clear their place; or take this device's own.

    Args:
        pointer: of the first four; the others follow at ``stride`` bytes each.
        mine: this device's.
        unless: take these.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    count = len(mine)
    place, taken, flag = f"${count}", [f"${count + 1 + i}" for i in range(count)], f"${2 * count + 1}"
    groups = [(f"[{place} + {stride * i}]", range(4 * i, 4 * i + 4)) for i in range(count // 4)]
    takes = "".join(f"mov.b32 ${i}, {word};\n" for i, word in enumerate(taken))
    reads = "".join(
        f"ld.relaxed.sys.global.v4.b32 {{{', '.join(f'${i}' for i in group)}}}, {at};\n"
        for at, group in groups
    )
    checks = "".join(f"setp.eq.or.b32 wait, ${i}, nothing, wait;\n" for i in range(1, count))
    clears = "".join(
        f"st.relaxed.sys.global.v4.b32 {at}, {{nothing, nothing, nothing, nothing}};\n" for at, _ in groups
    )
    code = f"""{{
        .reg .pred skip, wait, again;
        .reg .b32 turns, nothing;
        {takes}
        mov.b32 turns, 0;
        mov.b32 nothing, {NOTHING};
        setp.ne.b32 skip, {flag}, 0;
        @skip bra DONE;
    READ:
        {reads}
        setp.eq.b32 wait, $0, nothing;
        {checks}
        @!wait bra CLEAR;
        add.u32 turns, turns, 1;
        setp.lt.u32 again, turns, {PATIENCE};
        @again bra READ;
        trap;
    CLEAR:
        {clears}
    DONE:
    }}"""
    constraints = ",".join(["=&r"] * count + ["l"] + ["r"] * (count + 1))
    result = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    operands = [pointer, *mine, _flag(unless)]
    return _words(llvm.inline_asm(result, operands, code, constraints, has_side_effects=True), count)


def _vector(words: list[Any]) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    return vector.from_elements(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)), words)


def widen(words: list[Any], element: Any) -> Any:
    """Four words as a vector of float32."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    length, f32 = VECTOR * 8 // element.width, ir.F32Type.get()
    values = vector.bitcast(ir.VectorType.get((length,), element), _vector(words))
    return values if element == f32 else arith.extf(ir.VectorType.get((length,), f32), values)


def round_to(values: Any, element: Any) -> Any:
    """A vector of float32, rounded to another type."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    if element == ir.F32Type.get():
        return values
    return arith.truncf(ir.VectorType.get(ir.VectorType(values.type).shape, element), values)


def narrow(values: Any, element: Any) -> list[Any]:
    """A vector of float32, rounded, as four words."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import vector

    i32 = ir.IntegerType.get_signless(32)
    words = vector.bitcast(ir.VectorType.get((4,), i32), round_to(values, element))
    return [vector.extract(words, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]

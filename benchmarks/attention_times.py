"""The sections ``decode``, ``prefill``, ``mixed``, ``sweep`` and ``prefill_sweep`` of kernels.py: attention's times.

A section compiles everything first and then waits for its turn (``Context.await_turn``), so that processes compile
side by side and measure one at a time. A peer that raises is a row with its error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
BLOCKS = (16, 64)
"""Tokens in a KV block; the first is what peers are compared with, the last is the engine's."""
BLOCK = BLOCKS[0]

Rows = Sequence[tuple[int, int]]
"""(Context with the new tokens, new tokens) of each row, decoding rows first."""


@dataclass(frozen=True)
class Case:
    """A batch to time, and its target: us or TB/s of decoding rows, TFLOP/s of others."""

    rows: Rows
    target: float = 0.0
    unit: str = ""
    padding: tuple[tuple[str, int], ...] = ()
    title: str = ""

    @property
    def name(self) -> str:
        context, new = self.rows[0]
        if self.title:
            return self.title
        if new == 1:
            return f"decode {len(self.rows)} x {context}"
        return f"prefill {len(self.rows)} x {new}" + (f" after {context - new}" if context > new else "")

    @property
    def bytes(self) -> int:
        return sum(2 * context * KV_HEADS * HEAD_SIZE * 2 for context, _ in self.rows)

    @property
    def operations(self) -> float:
        return sum(4 * HEADS * HEAD_SIZE * (n * (c - n) + n * (n + 1) / 2) for c, n in self.rows)


def decode_case(rows: int, context: int, target: float = 0.0, unit: str = "") -> Case:
    return Case([(context, 1)] * rows, target, unit)


DECODE = [
    decode_case(1, 4096, 7.0, "us"), decode_case(256, 1024, 4.1, "TB/s"), decode_case(1, 32768, 3.0, "TB/s"),
    decode_case(64, 4096, 4.1, "TB/s"), decode_case(16, 2048, 3.7, "TB/s"), decode_case(64, 1024),
    decode_case(8, 1024), decode_case(1, 1024),
]  # fmt: skip
PREFILL = [
    Case([(8192, 8192)], 570), Case([(4096, 4096)] * 4, 570), Case([(16384, 2048)], 590), Case([(33280, 512)], 500),
    Case([(2048, 2048)]), Case([(1024, 1024)] * 8), Case([(512, 512)]),
]  # fmt: skip
MIXED = [
    Case([(1024, 1)] * 200), Case([(2048, 2048)]),
    Case([(1024, 1)] * 200 + [(2048, 2048)], title="mixed 200 x 1024 + 2048"),
    Case(
        [(1024, 1)] * 200 + [(2048, 2048)], title="the same, padded",
        padding=(("pad_tokens", 4096 - 2248), ("pad_rows", 55)),
    ),
]  # fmt: skip
MIXED_LIMIT = 1.15
"""Time of a mixed step over the sum of its parts' times."""

SWEEP_DECODE = [decode_case(r, c) for r, c in ((1, 1024), (1, 4096), (16, 2048), (64, 1024))]
SWEEP = [
    dict(),
    dict(separate=False),
    dict(merge=11),
    dict(min_chunk=1, max_chunks=16, merge=11),
    dict(step=64, stages=6, min_chunk=2, max_chunks=16, merge=11),
    dict(step=64, stages=6, min_chunk=4, max_chunks=16, merge=11),
]
"""What is changed of the decode configuration."""

SWEEP_PREFILL = [Case(each.rows) for each in PREFILL if each.rows[0] != (33280, 512)]
PREFILL_SWEEP = [
    dict(),
    dict(consumer_registers=216, producer_registers=72),
]
"""What is changed of the prefill configuration."""

TINY_DECODE = [Case([(200, 1)] * 2, 7.0, "us")]
TINY_PREFILL = [Case([(90, 90)], 570)]
TINY_MIXED = [Case([(70, 1)]), Case([(70, 70)]), Case([(70, 1), (70, 70)], title="mixed")]


@dataclass
class Compiled:
    """A program of some layers, ready to run again and again: each run leaves the caches for the next."""

    case: Case
    block_size: int
    layers: int
    metadata: Any
    inputs: tuple[Any, ...]
    caches: list[Any]
    programs: dict[str, Any]

    def runner(self, path: str) -> Callable[[], Any]:
        program = self.programs[path]

        def run() -> Any:
            out, self.caches = program(*self.inputs, self.caches, self.metadata)
            return out

        return run


def compiled(
    context: Any, case: Case, block_size: int, layers: int, backends: dict[str, Any], *, fill: bool = True
) -> Compiled:
    from pallas_kernels.ragged_paged_attention.options import AttentionOptions

    metadata, num_blocks, _ = context.batch(case.rows, block_size=block_size, **dict(case.padding))
    tokens = metadata.positions.shape[0]
    shape = context.tuned.kv_cache_shape(num_blocks, block_size, KV_HEADS, HEAD_SIZE)
    dtype = context.jnp.bfloat16
    shapes = [
        context.jax.ShapeDtypeStruct((tokens, h, HEAD_SIZE), dtype) for h in (HEADS, KV_HEADS, KV_HEADS)
    ]
    caches = [context.jax.ShapeDtypeStruct(shape, dtype)] * layers
    options = AttentionOptions(scale=HEAD_SIZE**-0.5)
    programs = {
        path: context.layers(layers, options, backend=backend).lower(*shapes, caches, metadata).compile()
        for path, backend in backends.items()
    }
    inputs = tuple(context.random(*each.shape) for each in shapes)
    filled = [context.random(*shape) for _ in range(layers)] if fill else []
    return Compiled(case, block_size, layers, metadata, inputs, filled, programs)


def mine(items: Sequence[Any]) -> list[Any]:
    """This process' share of a section's work."""
    shard, shards = map(int, os.environ.get("KERNELS_SHARD", "0/1").split("/"))
    return list(items[shard::shards])


def decode_layers(case: Case) -> int:
    """As many layers as it takes for their caches not to stay in the L2."""
    return int(min(24, max(4, 3e8 // case.bytes)))


def name_of(case: Case, block_size: int) -> str:
    return case.name + ("" if block_size == BLOCKS[0] else f", blocks {block_size}")


# --- sections --------------------------------------------------------------------------------------------------


def decode(context: Any, emit: Callable[..., None]) -> None:
    cases = mine(TINY_DECODE if context.tiny else DECODE)
    ready = [
        compiled(context, case, block, decode_layers(case), {"ours": context.tuned})
        for case in cases
        for block in ((BLOCKS[0],) if context.tiny else BLOCKS)
    ]
    peers = (
        []
        if context.ours_only
        else [(each, deprecated(context, each)) for each in ready if is_compared(each)]
    )
    context.await_turn()
    for each in ready:
        record = dict(section="decode", name=name_of(each.case, each.block_size), unit="TB/s")
        time_one(
            context,
            emit,
            record,
            "ours",
            each.runner("ours"),
            each.layers,
            each.case.bytes,
            each.case,
            ours=True,
        )
    for each, splits in peers:
        record = dict(section="decode", name=each.case.name, unit="TB/s")
        best_of(context, emit, record, "jax deprecated", splits, each.case.bytes)
        time_one(context, emit, record, "gather", gather(context, each), each.layers, each.case.bytes)


def prefill(context: Any, emit: Callable[..., None]) -> None:
    cases = mine(TINY_PREFILL if context.tiny else PREFILL)
    ready = [
        compiled(context, case, block, 3, {"ours": context.tuned})
        for case in cases
        for block in ((BLOCKS[0],) if context.tiny else BLOCKS)
    ]
    whole = [each for each in ready if is_compared(each) and each.case.rows[0][0] == each.case.rows[0][1]]
    peers = [] if context.ours_only else [(each, cudnn(context, each)) for each in whole]
    context.await_turn()
    for each in ready:
        record = dict(section="prefill", name=name_of(each.case, each.block_size), unit="TFLOP/s")
        time_one(
            context, emit, record, "ours", each.runner("ours"), 3, each.case.operations, each.case,
            ours=True, kernel="paged_prefill",
        )  # fmt: skip
    for each, dense in peers:
        record = dict(section="prefill", name=each.case.name, unit="TFLOP/s")
        time_one(context, emit, record, "cudnn dense", dense, 3, each.case.operations)


def mixed(context: Any, emit: Callable[..., None]) -> None:
    cases = TINY_MIXED if context.tiny else MIXED
    ready = [compiled(context, case, BLOCKS[-1], 3, {"ours": context.tuned}) for case in cases]
    context.await_turn()
    layers_us: list[float] = []
    for each in ready:
        runs = context.profile(each.runner("ours"))
        kernel, layer = context.kernel_and_layer(runs, 3, is_ours)
        parts = {
            part: context.kernel_and_layer(runs, 3, lambda name, part=part: part in name)[0]
            for part in ("paged_update", "paged_decode", "paged_prefill")
            if any(part in event[0] for event in runs[0])
        }
        parts["other"] = sum(event[2] for event in runs[0] if not is_ours(event[0]))
        path = " ".join(f"{part.removeprefix('paged_')} {us:.1f}" for part, us in parts.items())
        target = ""
        if len(layers_us) >= 2:
            target = f"{layer / (layers_us[0] + layers_us[1]):.2f} of {MIXED_LIMIT}"
        layers_us.append(layer)
        emit(
            section="mixed", name=each.case.name, path=path, unit="TFLOP/s", kernel_us=kernel, layer_us=layer,
            rate=each.case.operations / layer / 1e6, target=target,
        )  # fmt: skip


def sweep(context: Any, emit: Callable[..., None]) -> None:
    from pallas_kernels.ragged_paged_attention.gpu import _tuned
    from pallas_kernels.ragged_paged_attention.gpu_decode_plan import DecodeConfig

    tuned = _tuned("decode", HEAD_SIZE)
    backends = {
        spell(each): replace(context.tuned, decode=DecodeConfig(**{**tuned, **each})) for each in mine(SWEEP)
    }
    cases = TINY_DECODE if context.tiny else SWEEP_DECODE
    sweep_over(context, emit, "sweep", "TB/s", cases, backends, decode_layers, lambda case: case.bytes)


def prefill_sweep(context: Any, emit: Callable[..., None]) -> None:
    from pallas_kernels.ragged_paged_attention.gpu import _tuned
    from pallas_kernels.ragged_paged_attention.gpu_prefill_plan import PrefillConfig

    tuned = _tuned("prefill", HEAD_SIZE)
    backends = {
        spell(each): replace(context.tuned, prefill=PrefillConfig(**{**tuned, **each}))
        for each in mine(PREFILL_SWEEP)
    }
    cases = TINY_PREFILL if context.tiny else SWEEP_PREFILL
    sweep_over(
        context,
        emit,
        "prefill_sweep",
        "TFLOP/s",
        cases,
        backends,
        lambda case: 3,
        lambda case: case.operations,
    )


def sweep_over(context, emit, section: str, unit: str, cases, backends, layers, work) -> None:
    ready = [compiled(context, case, BLOCKS[-1], layers(case), backends) for case in cases]
    context.await_turn()
    for each in ready:
        record = dict(section=section, name=name_of(each.case, each.block_size), unit=unit)
        for path in backends:
            time_one(
                context, emit, record, path, each.runner(path), each.layers, work(each.case), ours=True,
                kernel="paged_prefill" if section == "prefill_sweep" else "paged_",
            )  # fmt: skip


def spell(change: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in change.items()) or "tuned"


# --- times -----------------------------------------------------------------------------------------------------


def is_ours(name: str) -> bool:
    return "paged_" in name


def is_compared(each: Compiled) -> bool:
    return each.block_size == BLOCKS[0]


def time_one(
    context: Any, emit: Callable[..., None], record: dict[str, Any], path: str, run: Callable[[], Any], layers: int,
    work: float, case: Case | None = None, *, ours: bool = False, kernel: str = "paged_",
) -> None:  # fmt: skip
    """Emit one row; where it is not ours, all kernels count, and a peer that raises is a row too."""
    target = f"{case.target:g} {case.unit}".strip() if case is not None and case.target else ""
    try:
        runs = context.profile(run)
        kernel_us, _ = context.kernel_and_layer(
            runs, layers, (lambda name: kernel in name) if ours else everything
        )
        _, layer_us = context.kernel_and_layer(runs, layers, is_ours if ours else everything)
    except Exception as error:
        emit(**record, path=path, error=f"{type(error).__name__}: {str(error)[:160]}", target=target)
        return
    rate = work / (kernel_us if ours else layer_us) / 1e6
    emit(**record, path=path, kernel_us=kernel_us, layer_us=layer_us, rate=rate, target=target)


def everything(name: str) -> bool:
    del name
    return True


def best_of(context, emit, record, path: str, runs: Iterator[tuple[Any, int]], work: float) -> None:
    """The fastest of some variants, or the last one's error."""
    best: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    for run, layers in runs:
        found: list[dict[str, Any]] = []
        if isinstance(run, Exception):
            found.append(dict(record, path=path, error=f"{type(run).__name__}: {str(run)[:160]}"))
        else:
            time_one(context, lambda found=found, **row: found.append(row), record, path, run, layers, work)
        (errors if "error" in found[0] else best).append(found[0])
    if best or errors:
        emit(**min(best, key=lambda row: row["layer_us"]) if best else errors[-1])


# --- as a table ------------------------------------------------------------------------------------------------

COLUMNS = ("ours", "jax deprecated", "gather", "cudnn dense")


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """The rows of ``decode``, ``prefill`` and ``mixed`` as tables for RESULTS.md: a shape a line, a path a column.

    Ours is kernel and layer in us and the kernel's rate; a peer its layer and how many times ours it takes.
    """
    lines = []
    for section in ("decode", "prefill"):
        rows: dict[str, dict[str, dict[str, Any]]] = {}
        for each in records:
            if each["section"] == section and "path" in each:
                rows.setdefault(each["name"], {})[each["path"]] = each
        paths = [path for path in COLUMNS if any(path in row for row in rows.values())]
        if not rows:
            continue
        lines += ["", f"| {section} | target | " + " | ".join(paths) + " |", "|---" * (len(paths) + 2) + "|"]
        for name, row in rows.items():
            ours = row.get("ours", {})
            cells = [markdown_cell(row.get(path), ours) for path in paths]
            lines.append(
                f"| {name.removeprefix(section + ' ')} | {ours.get('target', '')} | {' | '.join(cells)} |"
            )
    steps = [each for each in records if each["section"] == "mixed" and "layer_us" in each]
    if steps:
        lines += ["", "| step | kernels, us | layer, us | over the sum of its parts |", "|---|---|---|---|"]
        lines += [f"| {r['name']} | {r['path']} | {r['layer_us']:.1f} | {r['target']} |" for r in steps]
    return "\n".join(lines)


def markdown_cell(record: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if record is None:
        return ""
    if "error" in record:
        return record["error"].split(":")[0]
    if record is ours:
        rate = f"{record['rate']:.{2 if record['unit'] == 'TB/s' else 0}f} {record['unit']}"
        return f"{record['kernel_us']:.1f} / {record['layer_us']:.1f}, {rate}"
    ratio = f", {record['layer_us'] / ours['layer_us']:.2f} x" if "layer_us" in ours else ""
    return f"{record['layer_us']:.1f}{ratio}"


# --- peers -----------------------------------------------------------------------------------------------------


def deprecated(context: Any, each: Compiled) -> list[tuple[Any, int]]:
    """(A run of JAX's deprecated kernel or why there is none, layers) for a few numbers of splits, compiled."""
    jax, jnp = context.jax, context.jnp
    try:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    except Exception as error:
        return [(error, 1)]
    layers = max(each.layers // 2, 2)
    halves = [tuple(jnp.moveaxis(cache[half], 0, 1) for half in range(2)) for cache in each.caches[:layers]]
    found: list[tuple[Any, int]] = []
    for splits in (1, 4, 16):

        def program(q, halves, metadata, splits=splits):
            for k, v in halves:
                q = paged_attention(
                    q * HEAD_SIZE**-0.5, k, v, metadata.block_tables, metadata.seq_lens, k_splits=splits
                ).astype(q.dtype)
            return q

        try:
            run = jax.jit(program).lower(each.inputs[0], halves, each.metadata).compile()
            found.append((functools.partial(run, each.inputs[0], halves, each.metadata), layers))
        except Exception as error:
            found.append((error, layers))
    return found


def gather(context: Any, each: Compiled) -> Callable[[], Any]:
    """XLA's gather of the cache, then products; compiled at its first run, which tunes itself on a quiet device."""
    jax, jnp = context.jax, context.jnp

    @jax.jit
    def program(q, caches, metadata):
        for cache in caches:
            rows, _, size = q.shape
            k, v = (jnp.moveaxis(half[metadata.block_tables], 2, 1) for half in cache)
            k, v = (x.reshape(rows, KV_HEADS, -1, size) for x in (k, v))
            grouped = q.reshape(rows, KV_HEADS, -1, size)
            s = jnp.einsum("rkgd,rksd->rkgs", grouped, k, preferred_element_type=jnp.float32) * size**-0.5
            s = jnp.where(jnp.arange(k.shape[2]) < metadata.seq_lens[:, None, None, None], s, -jnp.inf)
            p = jax.nn.softmax(s, -1).astype(q.dtype)
            q = jnp.einsum("rkgs,rksd->rkgd", p, v).reshape(rows, -1, size)
        return q

    return lambda: program(each.inputs[0], each.caches, each.metadata)


def cudnn(context: Any, each: Compiled) -> Callable[[], Any]:
    """Dense attention without pages, compiled at its first run."""
    jax = context.jax
    rows, new = len(each.case.rows), each.case.rows[0][1]

    @jax.jit
    def program(q, k, v):
        for _ in range(each.layers):
            q = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return q

    dense = [x.reshape(rows, new, -1, HEAD_SIZE) for x in each.inputs]
    return lambda: program(*dense)

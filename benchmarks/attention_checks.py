"""The sections ``check`` and ``invariance`` of kernels.py: whether attention is right, and on what its bits depend."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from attention_times import BLOCK, HEAD_SIZE, HEADS, KV_HEADS

ORACLE_TOKENS, ORACLE_BYTES = 96, 1 << 27
"""Query tokens of a batch that the oracle checks, and float32 keys that it gathers at a time (it holds several times as
many bytes): twenty processes share the GPU, and those that are to measure hold their caches already."""


def check(context: Any, emit: Callable[..., None]) -> None:
    """Random ragged batches over a cache whose unwritten slots hold NaN, each against the oracle."""
    from pallas_kernels.ragged_paged_attention.options import AttentionOptions as Options

    def lengths(n: int, most: int) -> list[tuple[int, int]]:
        return [(int(x), 1) for x in context.rng.integers(1, most, n)]

    def decode(n: int, most: int) -> dict[str, Any]:
        return dict(rows=lengths(n, most), pad_rows=3, pad_tokens=3)

    mixed = dict(
        rows=[*lengths(9, 900), (90, 90), (700, 33), (5, 2), (1500, 1500), (2100, 300)], pad_tokens=70
    )
    cases: list[tuple[str, dict[str, Any]]] = [
        ("decode 1", dict(rows=[(4096, 1)])),
        (
            "decode edges",
            dict(
                rows=[(n, 1) for n in (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1024)],
                pad_rows=5,
                pad_tokens=5,
            ),
        ),
        ("decode ragged", decode(64, 4096)),
        ("decode long", dict(rows=[(20001, 1), (7, 1)])),
        ("decode many", decode(500, 300)),
        ("decode none", dict(rows=[], pad_rows=4, pad_tokens=4)),
        ("mixed", mixed),
        ("one prompt", dict(rows=[(1024, 1024)])),
        ("chunk", dict(rows=[(3000, 500)], pad_tokens=12)),
        ("short prompts", dict(rows=[(n, n) for n in range(2, 40)], pad_tokens=9)),
    ]
    for group_heads in ((8, 8), (16, 8), (24, 8), (40, 8), (64, 8), (16, 1), (9, 1), (4, 2)):
        cases += [
            (f"decode {group_heads}", dict(heads=group_heads, **decode(20, 700))),
            (f"mixed {group_heads}", dict(heads=group_heads, **mixed)),
        ]
    for head_size in (64, 80, 96, 192, 256):
        cases += [
            (f"decode D={head_size}", dict(head_size=head_size, **decode(20, 1300))),
            (f"mixed D={head_size}", dict(head_size=head_size, **mixed)),
        ]
    for block_size in (8, 32, 64, 128, 256):
        cases += [
            (f"decode block {block_size}", dict(block_size=block_size, **decode(20, 1300))),
            (f"mixed block {block_size}", dict(block_size=block_size, **mixed)),
        ]
    for name, extra in {
        "window": dict(sliding_window=100), "wide window": dict(sliding_window=1000), "cap": dict(soft_cap=20.0),
        "window cap sinks": dict(sliding_window=300, soft_cap=20.0, sinks=True), "sinks": dict(sinks=True),
    }.items():  # fmt: skip
        cases += [
            (f"decode {name}", dict(extra=extra, **decode(30, 2500))),
            (f"mixed {name}", dict(extra=extra, **mixed)),
        ]
    cases += [
        ("decode f16", dict(dtype="float16", **decode(20, 700))),
        ("mixed f16", dict(dtype="float16", **mixed)),
    ]
    cases += [("all decode, mixed program", dict(decode_only=False, **decode(20, 700)))]
    worst, shard, shards = 0.0, *map(int, os.environ.get("KERNELS_SHARD", "0/1").split("/"))
    cases = cases[shard::shards]
    for name, case in cases:
        error, note = check_one(context, Options, **case)
        worst = max(worst, error)
        if error > 1e-2 or not error >= 0 or note:
            emit(section="check", name=name, error=f"{error:.2e}", wrong=True, note=note)
    emit(
        section="check",
        name=f"{len(cases)} batches",
        worst_error=f"{worst:.2e}",
        device=str(context.jax.devices()[0]),
    )


def check_one(
    context: Any, options_type: Any, rows, heads=(HEADS, KV_HEADS), head_size=HEAD_SIZE, block_size=BLOCK,
    dtype="bfloat16", extra=None, **padding,
) -> tuple[float, str]:  # fmt: skip
    from dataclasses import replace

    from pallas_kernels.kv_cache_update.reference import kv_cache_update

    jax, jnp = context.jax, context.jnp
    num_heads, kv_heads = heads
    metadata, num_blocks, cached = context.batch(rows, block_size=block_size, **padding)
    num_tokens, live = metadata.positions.shape[0], sum(new for _, new in rows)
    dtype = jnp.dtype(dtype)
    q, k, v = (
        context.random(num_tokens, h, head_size, dtype=dtype).at[live:].set(jnp.nan)
        for h in (num_heads, kv_heads, kv_heads)
    )
    stored = context.stored_head_size(head_size)
    fresh = jnp.full((2, num_blocks, kv_heads, block_size, head_size), jnp.nan, dtype)
    values = context.random(2, len(cached), kv_heads, head_size, dtype=dtype)
    cache = fresh.at[:, cached // block_size, :, cached % block_size].set(jnp.moveaxis(values, 0, 1))
    extra = dict(extra or {})
    sinks = 3 * context.random(num_heads, dtype=jnp.float32) if extra.pop("sinks", False) else None
    options = options_type(scale=head_size**-0.5, **extra)
    wide = jnp.pad(cache, (*[(0, 0)] * 4, (0, stored - head_size)))
    expected_cache = kv_cache_update(cache, k, v, metadata.slot_mapping)
    backend = context.tuned if stored == HEAD_SIZE else replace(context.tuned, decode=None, prefill=None)
    run = jax.jit(backend.update_and_attend, static_argnums=5, donate_argnums=3)
    before = wide.unsafe_buffer_pointer()
    out, wide = run(q, k, v, wide, metadata, options, sinks)
    note = "" if wide.unsafe_buffer_pointer() == before else "the cache moved"
    same = jnp.array_equal(wide[..., :head_size], expected_cache, equal_nan=True)
    note += "" if same else " the cache differs"
    note += "" if bool(jnp.isfinite(out).all()) else " not finite"
    note += "" if not bool(jnp.any(out[live:])) else " padding is not zero"
    sample = np.unique(context.rng.integers(0, max(live, 1), ORACLE_TOKENS))[:live]
    if len(sample) == 0:
        return 0.0, note
    longest = max(length for length, _ in rows)
    at_a_time = max(1, ORACLE_BYTES // (4 * longest * kv_heads * head_size))
    groups = np.resize(sample, (-(-len(sample) // at_a_time), min(at_a_time, len(sample))))
    expected = [oracle(q, expected_cache, metadata, options, sinks, group) for group in groups]
    difference = [out[group].astype(jnp.float32) - each for group, each in zip(groups, expected)]
    error, whole = (float(jnp.linalg.norm(jnp.concatenate(x))) for x in (difference, expected))
    return error / whole, note.strip()


def oracle(q: Any, kv_cache: Any, metadata: Any, options: Any, sinks: Any, tokens: np.ndarray) -> Any:
    """The float32 result of some of a batch's query tokens."""
    from dataclasses import replace

    from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention

    few = replace(
        metadata, positions=metadata.positions[tokens], row_ids=metadata.row_ids[tokens],
        query_start_loc=metadata.query_start_loc * 0 + len(tokens), decode_only=False,
    )  # fmt: skip
    return ragged_paged_attention(
        q[tokens].astype("float32"), kv_cache, few, scale=options.scale, sinks=sinks,
        sliding_window=options.sliding_window, soft_cap=options.soft_cap,
    )  # fmt: skip


def invariance(context: Any, emit: Callable[..., None]) -> None:
    """A row's bits alone and in company; a prompt's bits whole and in chunks; no copy of the cache in the program."""
    from dataclasses import replace

    from pallas_kernels.ragged_paged_attention.options import AttentionOptions

    jax, jnp = context.jax, context.jnp
    options = AttentionOptions(scale=HEAD_SIZE**-0.5)
    run = jax.jit(context.tuned.update_and_attend, static_argnums=5)
    rows = [(int(n), 1) for n in [40, 4096, 12345, *context.rng.integers(1, 3000, 61)]]
    metadata, num_blocks, _ = context.batch(rows)
    cache = context.random(*context.tuned.kv_cache_shape(num_blocks, BLOCK, KV_HEADS, HEAD_SIZE))
    q, k, v = (context.random(len(rows), h, HEAD_SIZE) for h in (HEADS, KV_HEADS, KV_HEADS))
    together, _ = run(q, k, v, cache, metadata, options)
    different = 0
    for picked in [[0], [1], [2], [1, 2], list(range(9)), list(range(3, 40)), *[[i] for i in range(3, 20)]]:
        n = np.asarray(picked)
        some = replace(
            metadata, seq_lens=metadata.seq_lens[n], block_tables=metadata.block_tables[n],
            query_start_loc=jnp.arange(len(n) + 1, dtype=jnp.int32),
            distribution=jnp.full(3, len(n), jnp.int32), slot_mapping=metadata.slot_mapping[n],
            positions=metadata.positions[n], row_ids=jnp.arange(len(n), dtype=jnp.int32),
        )  # fmt: skip
        alone, _ = run(q[n], k[n], v[n], cache, some, options)
        different += int(jnp.any(alone != together[n], axis=(1, 2)).sum())
    emit(
        section="invariance",
        name="decoding rows whose bits depend on company",
        value=different,
        wrong=different > 0,
    )
    tokens = 1500
    metadata, num_blocks, _ = context.batch([(tokens, tokens)], pad_tokens=36)
    cache = context.random(*context.tuned.kv_cache_shape(num_blocks, BLOCK, KV_HEADS, HEAD_SIZE))
    q, k, v = (context.random(tokens + 36, h, HEAD_SIZE) for h in (HEADS, KV_HEADS, KV_HEADS))
    whole, _ = run(q, k, v, cache, metadata, options)
    different, chunk = 0, 311
    for begin in range(0, tokens, chunk):
        n = np.arange(begin, min(begin + chunk, tokens))
        end = int(n[-1]) + 1
        part = replace(
            metadata, seq_lens=jnp.asarray([end], jnp.int32), query_start_loc=jnp.asarray([0, len(n)], jnp.int32),
            slot_mapping=metadata.slot_mapping[n], positions=metadata.positions[n], row_ids=metadata.row_ids[n],
        )  # fmt: skip
        out, cache = run(q[n], k[n], v[n], cache, part, options)
        different += int(jnp.any(out != whole[n], axis=(1, 2)).sum())
    emit(
        section="invariance",
        name="prompt tokens whose bits depend on chunks",
        value=different,
        wrong=different > 0,
    )
    for name, case in {"decode": [(700, 1)] * 16, "mixed": [(700, 1)] * 4 + [(900, 252)]}.items():
        metadata, num_blocks, _ = context.batch(case)
        shape = context.tuned.kv_cache_shape(num_blocks, BLOCK, KV_HEADS, HEAD_SIZE)
        caches = [context.random(*shape) for _ in range(4)]
        q, k, v = (
            context.random(metadata.positions.shape[0], h, HEAD_SIZE) for h in (HEADS, KV_HEADS, KV_HEADS)
        )
        compiled = context.layers(4, options).lower(q, k, v, caches, metadata).compile()
        text = compiled.as_text()
        wanted = f"bf16[{','.join(map(str, shape))}]"
        copies = [
            line for line in text.splitlines() if wanted in line.split("=", 1)[-1][:90] and " copy" in line
        ]
        emit(
            section="invariance",
            name=f"cache copies in the compiled {name} step",
            value=len(copies),
            wrong=bool(copies),
        )

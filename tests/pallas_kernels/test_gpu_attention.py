"""The Hopper backend against the float32 oracle, interpreted: fresh ragged batches over a cache full of NaN."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_copies import watched_copies
from gpu_interpreter import (
    MOSAIC_GPU,
    forbid_copies_out_of_bounds,
    needs_mosaic_gpu,
    run,
    strict,
    unexpected_races,
)
from ragged_batches import RaggedBatch, in_cache_type, ragged_batch

from pallas_kernels.kv_cache_update.quantized import KVCache, ScaledCache, abstract_cache, values_of
from pallas_kernels.kv_cache_update.reference import kv_cache_update
from pallas_kernels.mosaic_gpu import launch as gpu_launch
from pallas_kernels.ragged_paged_attention.gpu import GpuBackend, device_why_not, stored_head_size, supported
from pallas_kernels.ragged_paged_attention.gpu_decode_plan import DecodeConfig
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention

pytestmark = pytest.mark.device

SMALL = DecodeConfig(ctas_per_sm=2, min_chunk=1, max_chunks=4)
"""Short chunks, so that short rows are cut and merged too."""

LONG_STEPS = replace(SMALL, step=128, stages=3)


@pytest.fixture(autouse=True)
def copies_in_bounds(monkeypatch):
    if MOSAIC_GPU:
        forbid_copies_out_of_bounds(monkeypatch)


def backend(num_sms: int = 2, config: DecodeConfig = SMALL) -> GpuBackend:
    return GpuBackend(num_sms=num_sms, decode=config, interpret=strict())


def attend(batch: RaggedBatch, options: AttentionOptions, sinks=None, *, layers=1, num_sms=2, config=SMALL):
    """(result, cache) of the backend, and of the oracle; the cache in the oracle's shape."""
    values = values_of(batch.kv_cache)
    head_size, kv_heads, block_size = batch.q.shape[2], batch.k.shape[1], values.shape[3]
    ours = backend(num_sms, config)
    shape = ours.kv_cache_shape(values.shape[1], block_size, kv_heads, head_size)
    padded = jnp.pad(values, [(0, 0)] * 4 + [(0, shape[4] - head_size)])
    cache = with_values(batch.kv_cache, padded)

    def step(q, k, v, cache, metadata, sinks):
        plan = ours.prepare(
            metadata, options, num_tokens=q.shape[0], num_heads=q.shape[1], num_kv_heads=kv_heads,
            head_size=head_size, kv_cache=cache,
        )  # fmt: skip
        for _ in range(layers):
            out, cache = ours.update_and_attend(q, k, v, cache, metadata, options, sinks, plan)
        return out, cache

    out, cache = run(step, batch.q, batch.k, batch.v, cache, batch.metadata, sinks)
    expected_cache = kv_cache_update(batch.kv_cache, batch.k, batch.v, batch.metadata.slot_mapping)
    expected = ragged_paged_attention(
        batch.q.astype(jnp.float32), expected_cache, batch.metadata, scale=options.scale, sinks=sinks,
        sliding_window=options.sliding_window, soft_cap=options.soft_cap,
    )  # fmt: skip
    return (out, with_values(cache, values_of(cache)[..., :head_size])), (expected, expected_cache)


def with_values(cache: KVCache, values: jax.Array) -> KVCache:
    return replace(cache, values=values) if isinstance(cache, ScaledCache) else values


def check(batch: RaggedBatch, options: AttentionOptions, sinks=None, *, capsys, **kwargs) -> None:
    (out, cache), (expected, expected_cache) = attend(batch, options, sinks, **kwargs)
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(expected_cache)):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
    out, expected = np.asarray(out, np.float32), np.asarray(expected, np.float32)
    live = int(batch.metadata.query_start_loc[-1])
    np.testing.assert_array_equal(out[live:], 0)
    if live:
        assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 5e-3
    assert not unexpected_races(capsys.readouterr().out)


def decode_batch(rows: list[int], kv_dtype="bfloat16", **kwargs) -> RaggedBatch:
    batch = ragged_batch([(context, 1) for context in rows], pad_tokens=2, dtype=jnp.bfloat16, **kwargs)
    batch = replace(batch, kv_cache=in_cache_type(batch.kv_cache, kv_dtype))
    return replace(batch, metadata=replace(batch.metadata, decode_only=True))


DECODE = {
    "edges": (dict(rows=[1, 15, 16, 17, 63, 64, 65, 128]), {}),
    "long among short": (dict(rows=[7, 700, 3]), {}),
    "no rows": (dict(rows=[]), {}),
    "one query head a KV head": (dict(rows=[70, 200], heads=2, kv_heads=2), {}),
    "long steps, edges": (dict(rows=[1, 63, 64, 65, 127, 128, 129], kv_heads=1, config=LONG_STEPS), {}),
    "long steps, block of 256, window": (
        dict(rows=[70, 500], block_size=256, config=LONG_STEPS),
        dict(sliding_window=100),
    ),
    "group of 3": (dict(rows=[70, 200], heads=3, kv_heads=1), {}),
    "group of 16, float8 cache": (
        dict(rows=[70, 200], heads=16, kv_heads=1, kv_dtype="float8_e4m3fn"),
        {},
    ),
    "head of 80": (dict(rows=[70, 200], head_size=80), {}),
    "head of 96, group of 5": (dict(rows=[15, 200], head_size=96, heads=5, kv_heads=1), {}),
    "head of 128, block of 64": (dict(rows=[70, 200], head_size=128, block_size=64), {}),
    "head of 256, block of 256": (dict(rows=[70], head_size=256, block_size=256, heads=2, kv_heads=1), {}),
    "block of 8, int8 cache": (dict(rows=[70, 200], block_size=8, kv_dtype="int8"), {}),
    "window": (dict(rows=[70, 500]), dict(sliding_window=100)),
    "soft cap": (dict(rows=[70, 200]), dict(soft_cap=2.0)),
    "float8 cache": (dict(rows=[1, 64, 65, 300], kv_dtype="float8_e4m3fn"), {}),
    "int8 cache": (dict(rows=[1, 64, 65, 300], kv_dtype="int8"), {}),
    "int8 cache, head of 80, block of 128, window": (
        dict(rows=[70, 300], kv_dtype="int8", head_size=80, block_size=128),
        dict(sliding_window=100),
    ),
    "float8 cache, head of 128, group of 8, window": (
        dict(rows=[70, 500], kv_dtype="float8_e4m3fn", heads=8, kv_heads=1, head_size=128, block_size=64),
        dict(sliding_window=100),
    ),
}


FURTHER = {"group of 9", "head of 80", "block of 128", "float8 cache", "int8 cache", "group of 3"}
"""What other cases cover together with more."""


def cases(table: dict[str, tuple]) -> list:
    return [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in FURTHER)) for name in table]


@needs_mosaic_gpu
@pytest.mark.parametrize("name", cases(DECODE))
def test_decode(name, capsys):
    batch, options = DECODE[name]
    batch = {"heads": 4, "kv_heads": 2, "head_size": 64, "seed": len(name), "config": SMALL, **batch}
    config = batch.pop("config")
    batch, layers = decode_batch(**batch), 2 if name == "edges" else 1
    check(batch, AttentionOptions(scale=0.2, **options), capsys=capsys, layers=layers, config=config)


MIXED = {
    "everything": (dict(rows=[(40, 1), (129, 1), (70, 70), (150, 33), (5, 2)]), {}),
    "prompt": (dict(rows=[(140, 140)]), {}),
    "fewer tokens than a tile": (dict(rows=[(20, 3), (9, 2)], pad_tokens=1), {}),
    "only decoding rows": (dict(rows=[(40, 1), (9, 1)]), {}),
    "group of 3": (dict(rows=[(100, 60)], heads=3, kv_heads=1), {}),
    "group of 9": (dict(rows=[(100, 40)], heads=9, kv_heads=1), {}),
    "head of 80": (dict(rows=[(100, 60)], head_size=80), {}),
    "head of 96, group of 7": (dict(rows=[(49, 33)], head_size=96, heads=7, kv_heads=1), {}),
    "head of 128, group of 8": (dict(rows=[(100, 60)], head_size=128, heads=8, kv_heads=1), {}),
    "head of 256, block of 64": (
        dict(rows=[(100, 60), (20, 9)], head_size=256, block_size=64, heads=2, kv_heads=1),
        {},
    ),
    "block of 128": (dict(rows=[(300, 60)], block_size=128), {}),
    "window": (dict(rows=[(40, 1), (300, 60), (90, 90)]), dict(sliding_window=50)),
    "soft cap": (dict(rows=[(100, 60)]), dict(soft_cap=2.0)),
    "float8 cache": (dict(rows=[(40, 1), (150, 33), (5, 2)], kv_dtype="float8_e4m3fn"), {}),
    "int8 cache": (dict(rows=[(40, 1), (150, 33), (5, 2)], kv_dtype="int8"), {}),
    "int8 cache, block of 128, window": (
        dict(rows=[(300, 60)], kv_dtype="int8", block_size=128),
        dict(sliding_window=50),
    ),
    "float8 cache, head of 256, window": (
        dict(rows=[(200, 60)], kv_dtype="float8_e4m3fn", head_size=256, block_size=64, heads=2, kv_heads=1),
        dict(sliding_window=50),
    ),
}


@needs_mosaic_gpu
@pytest.mark.parametrize("name", cases(MIXED))
def test_mixed(name, capsys):
    batch, options = MIXED[name]
    defaults = {"heads": 4, "kv_heads": 2, "head_size": 64, "dtype": jnp.bfloat16, "seed": len(name)}
    kv_dtype = batch.get("kv_dtype", "bfloat16")
    made = ragged_batch(**{k: v for k, v in {**defaults, **batch}.items() if k != "kv_dtype"})
    made = replace(made, kv_cache=in_cache_type(made.kv_cache, kv_dtype))
    check(made, AttentionOptions(scale=0.2, **options), capsys=capsys)


@needs_mosaic_gpu
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_random_batches(seed, capsys):
    """Random rows, mostly with lengths around the borders of blocks and steps; random shapes, options, cache type."""
    rng = np.random.default_rng(seed)

    def length(low: int, high: int) -> int:
        near = int(rng.choice([16, 32, 64, 128])) + int(rng.integers(-1, 2))
        return near if low <= near <= high and rng.random() < 0.7 else int(rng.integers(low, high + 1))

    decodes = [(length(1, 200), 1) for _ in range(rng.integers(1, 4))]
    longer = [(n + length(0, 100) * int(rng.integers(0, 2)), n) for n in (length(2, 70) for _ in range(2))]
    group, kv_heads = int(rng.integers(1, 9)), int(rng.integers(1, 3))
    batch = ragged_batch(
        decodes + longer, heads=group * kv_heads, kv_heads=kv_heads, head_size=int(rng.choice([64, 80, 96, 128])),
        block_size=int(rng.choice([16, 32, 64])), dtype=str(rng.choice(["bfloat16", "float16"])), seed=seed,
    )  # fmt: skip
    kv_dtype = batch.kv_cache.dtype if rng.random() < 0.5 else "float8_e4m3fn"
    options = AttentionOptions(
        0.2, sliding_window=None if rng.random() < 0.5 else length(1, 100),
        soft_cap=None if rng.random() < 0.5 else 4.0,
    )  # fmt: skip
    check(replace(batch, kv_cache=in_cache_type(batch.kv_cache, kv_dtype)), options, capsys=capsys)


@needs_mosaic_gpu
@pytest.mark.parametrize("decode_only", [True, False])
def test_blocks_outside_the_window_may_be_gone(decode_only, capsys):
    """Their table entries are 0, and the dummy block holds NaN. The short row's tile begins before its row."""
    window = 50
    rows = [(300, 1), (90, 1)] if decode_only else [(300, 1), (200, 40), (300, 9)]
    batch = ragged_batch(rows, heads=4, kv_heads=2, head_size=64, dtype=jnp.bfloat16, pad_tokens=2)
    tables = np.array(batch.metadata.block_tables)
    for row, (context, new) in enumerate(rows):
        tables[row, : max(context - new - window + 1, 0) // 16] = 0
    metadata = replace(batch.metadata, block_tables=jnp.asarray(tables), decode_only=decode_only)
    check(
        replace(batch, metadata=metadata), AttentionOptions(scale=0.2, sliding_window=window), capsys=capsys
    )


@needs_mosaic_gpu
@pytest.mark.parametrize("decode_only", [True, False])
def test_sinks_and_float16(decode_only, capsys):
    rows = [(70, 1), (200, 1)] + ([] if decode_only else [(100, 60)])
    batch = ragged_batch(
        rows, heads=4, kv_heads=2, head_size=64, dtype=jnp.float16, pad_tokens=2 if decode_only else 7
    )
    batch = replace(batch, metadata=replace(batch.metadata, decode_only=decode_only))
    sinks = jnp.asarray([3.0, -1.0, 0.5, 8.0], jnp.float32)
    check(batch, AttentionOptions(scale=0.2, sliding_window=150), sinks, capsys=capsys)


@needs_mosaic_gpu
def test_a_row_alone_has_the_bits_it_has_in_company():
    batch = decode_batch([300, 40, 130, 64, 7, 500], heads=4, kv_heads=2, head_size=64)
    options = AttentionOptions(scale=0.2)
    (together, _), _ = attend(batch, options)
    for kept in ([0], [5], [1, 2]):
        alone = batch.only_rows(kept)
        alone = replace(alone, metadata=replace(alone.metadata, decode_only=True))
        (out, _), _ = attend(alone, options, num_sms=3)
        np.testing.assert_array_equal(np.asarray(out[: len(kept)]), np.asarray(together)[kept])


@needs_mosaic_gpu
def test_a_live_row_in_the_wrong_program_shows():
    """A decode-only program leaves rows with more queries out: NaN says so, zeros would not."""
    batch = ragged_batch(
        [(40, 1), (30, 2)], heads=4, kv_heads=2, head_size=64, dtype=jnp.bfloat16, pad_tokens=1
    )
    batch = replace(batch, metadata=replace(batch.metadata, decode_only=True))
    (out, _), _ = attend(batch, AttentionOptions(scale=0.2))
    assert not np.isnan(np.asarray(out[0], np.float32)).any()
    assert np.isnan(np.asarray(out[1], np.float32)).all()
    np.testing.assert_array_equal(np.asarray(out[2:], np.float32), 0)


SHAPES = [
    # heads, kv heads, head size, block size, dtype[, the cache's]
    (32, 8, 128, 16, "bfloat16"), (64, 8, 128, 64, "bfloat16"), (16, 8, 128, 256, "float16"),
    (12, 2, 64, 32, "bfloat16"), (32, 2, 80, 16, "bfloat16"), (8, 4, 256, 16, "bfloat16"),
    (5, 1, 192, 8, "bfloat16"), (13, 1, 96, 128, "bfloat16"),
    (32, 8, 128, 16, "bfloat16", "float8_e4m3fn"), (4, 2, 256, 64, "float16", "float8_e4m3fn"),
    (6, 2, 64, 128, "bfloat16", "float8_e4m3fn"), (32, 8, 128, 64, "bfloat16", "int8"),
    (5, 1, 192, 8, "float16", "int8"),
]  # fmt: skip
OPTIONS = [
    AttentionOptions(scale=0.1), AttentionOptions(scale=0.1, sliding_window=4096, soft_cap=50.0),
]  # fmt: skip


@needs_mosaic_gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_lowers_for_hopper_in_place(shape, options):
    """Mosaic takes both programs for the card's 132 multiprocessors; copies are aligned, caches are aliased."""
    heads, kv_heads, head_size, block_size, dtype, kv_dtype = (*shape, shape[4])[:6]
    assert supported(head_size, heads // kv_heads, block_size, dtype, options, kv_dtype) is None
    num_rows, width = 24, 40
    ours = GpuBackend(num_sms=132)

    def program(decode_only: bool, num_tokens: int) -> str:
        def step(q, k, v, cache, metadata, sinks):
            return ours.update_and_attend(q, k, v, cache, metadata, options, sinks)

        def int32(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        metadata = AttentionMetadata(
            int32(num_rows), int32(num_rows, width), int32(num_rows + 1), int32(3), int32(num_tokens),
            int32(num_tokens), int32(num_tokens), decode_only=decode_only,
        )  # fmt: skip
        q, k = (jax.ShapeDtypeStruct((num_tokens, h, head_size), dtype) for h in (heads, kv_heads))
        cache = abstract_cache(
            ours.kv_cache_shape(99, block_size, kv_heads, head_size), kv_dtype, 99, block_size
        )
        sinks = jax.ShapeDtypeStruct((heads,), jnp.float32)
        traced = jax.jit(step, donate_argnums=3).trace(q, k, k, cache, metadata, sinks)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    with watched_copies(gpu_launch) as copies:
        decode, mixed = program(True, num_rows), program(False, 300)
    assert copies.seen > 20
    assert not copies.misaligned
    assert decode.count("@mosaic_gpu_v2") == 1
    assert mixed.count("@mosaic_gpu_v2") == 3
    for text in (decode, mixed):
        calls = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
        assert all("output_operand_alias" in call for call in calls)


def test_what_is_refused_says_why_and_what_serves_it():
    plain = AttentionOptions(scale=0.1)
    assert supported(128, 4, 16, jnp.bfloat16, plain) is None
    assert supported(80, 16, 256, jnp.float16, plain) is None
    for refused, word in {
        (128, 4, 16, "float32", plain): "float32",
        (300, 4, 16, "bfloat16", plain): "300",
        (128, 17, 16, "bfloat16", plain): "17",
        (128, 4, 48, "bfloat16", plain): "48",
        (128, 4, 16, "bfloat16", AttentionOptions(scale=-1.0)): "-1.0",
    }.items():
        reason = supported(*refused)
        assert reason is not None
        assert word in reason
        assert "portable path" in reason
    assert supported(128, 4, 16, "bfloat16", plain, "float8_e4m3fn") is None
    assert supported(128, 4, 16, "bfloat16", plain, "int8") is None
    reason = supported(256, 4, 16, "bfloat16", plain, "int8")
    assert reason is not None
    assert "fp8" in reason
    reason = supported(128, 4, 16, "bfloat16", plain, "float32")
    assert reason is not None
    assert "fp8" in reason


def test_this_device_is_refused():
    reason = device_why_not(jax.devices("cpu")[0])
    assert reason is not None
    assert "portable path" in reason


def test_head_sizes_are_stored_in_multiples_of_64():
    assert [stored_head_size(n) for n in (64, 80, 96, 128, 192, 256)] == [64, 128, 128, 128, 192, 256]

"""The TPU kernels against the float32 oracle, interpreted on a CPU: races and bounds checked, fresh memory NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from ragged_batches import RaggedBatch, in_cache_type, ragged_batch
from tpu_interpreter import COMPILER_OPTIONS, races_found, strict

from pallas_kernels.dispatch import AttentionOptions, AttentionSizes, attention_backend
from pallas_kernels.kv_cache_update.quantized import KVCache, ScaledCache
from pallas_kernels.kv_cache_update.reference import kv_cache_update
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.tpu import TpuAttentionBackend, supported
from pallas_kernels.ragged_paged_attention.tpu_tuning import Tiles
from sharding import make_mesh

pytestmark = pytest.mark.device

TILES = Tiles(query_tile=16, kv_chunk=32, table_bytes=1 << 19, cores=1, vmem_limit=1 << 26)
NUM_TOKENS, NUM_ROWS, TABLE_WIDTH, CONTEXT_BLOCKS = 40, 10, 10, 28
RELATIVE_ERROR = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}

DECODE = [(15, 1), (16, 1), (17, 1), (1, 1), (65, 1)]
MIXED = [(33, 1), (1, 1), (17, 17), (50, 12), (5, 2)]
PREFILL = [(40, 20), (16, 16)]


@dataclass(frozen=True)
class Case:
    """One compiled program, and the batches it is tried on."""

    heads: int
    kv_heads: int
    head_size: int
    block_size: int = 16
    dtype: str = "float32"
    options: AttentionOptions = AttentionOptions(0.125)
    sinks: bool = False
    tiles: Tiles = TILES
    batches: tuple[tuple[tuple[int, int], ...], ...] = (tuple(DECODE), tuple(MIXED))
    decode_only: bool = False
    kv_dtype: str | None = None


CASES = {
    "shared lanes": Case(4, 2, 64, batches=(tuple(DECODE), tuple(MIXED), tuple(PREFILL), ())),
    "all options in bfloat16": Case(
        3, 1, 128, dtype="bfloat16", options=AttentionOptions(0.1, sliding_window=20, soft_cap=5.0), sinks=True
    ),
    "padded lanes, one query head a key head, tables in two parts": Case(
        2, 2, 80, options=AttentionOptions(0.1, sliding_window=35),
        tiles=replace(TILES, table_bytes=6 * 4 * TABLE_WIDTH),
    ),
    "decoding rows alone": Case(4, 2, 64, batches=(tuple(DECODE), ()), decode_only=True),
    "float8 cache": Case(4, 2, 64, block_size=32, kv_dtype="float8_e4m3fn", batches=(tuple(MIXED),)),
    "int8 cache, window": Case(
        3, 1, 128, block_size=128, kv_dtype="int8", options=AttentionOptions(0.1, sliding_window=20),
        tiles=replace(TILES, kv_chunk=128), batches=(tuple(MIXED),),
    ),
    "two cores": Case(2, 1, 64, tiles=replace(TILES, cores=2), batches=(tuple(MIXED),)),
}  # fmt: skip
SLOW_CASES = {
    "int8 cache, shared lanes, several blocks a chunk, sinks, bfloat16": Case(
        6, 2, 64, block_size=128, kv_dtype="int8", dtype="bfloat16", sinks=True, tiles=replace(TILES, kv_chunk=256),
    ),
    "float8 cache, bfloat16": Case(8, 1, 80, block_size=32, kv_dtype="float8_e4m3fn", dtype="bfloat16"),
    "float16 queries": Case(4, 2, 96, dtype="float16", kv_dtype="bfloat16"),
    "groups of 16, two rows of lanes": Case(16, 1, 256, block_size=32, sinks=True),
    "many key heads": Case(9, 9, 96, batches=(tuple(MIXED),)),
    "large blocks": Case(4, 2, 64, block_size=256, tiles=replace(TILES, kv_chunk=256), dtype="bfloat16"),
    "blocks of 64, window inside a block": Case(
        6, 2, 128, block_size=64, options=AttentionOptions(0.1, sliding_window=9), tiles=replace(TILES, kv_chunk=64)
    ),
    "soft cap": Case(4, 4, 64, options=AttentionOptions(0.5, soft_cap=3.0), dtype="bfloat16"),
    "sinks in bfloat16": Case(10, 2, 64, sinks=True, dtype="bfloat16"),
}  # fmt: skip


def to_tpu_layout(cache: KVCache) -> KVCache:
    """The oracle's cache [2, N, K, B, D] in the backend's layout; unused lanes are zero, as in a fresh cache."""
    if isinstance(cache, ScaledCache):
        return replace(cache, values=to_tpu_layout(cache.values))
    head_size = cache.shape[-1]
    if head_size <= 64:
        both = jnp.concatenate([cache[0], cache[1]], axis=-1)[:, None]
    else:
        both = jnp.moveaxis(cache, 0, 1)
    return jnp.pad(both, ((0, 0),) * 4 + ((0, -both.shape[-1] % 128),))


def fixed_shapes(batch: RaggedBatch) -> RaggedBatch:
    """Widen tables and pool to sizes that all batches of a case share, so that one program serves them."""
    meta, old_blocks = batch.metadata, batch.kv_cache.shape[1]
    block_size = batch.kv_cache.shape[3]
    extra = CONTEXT_BLOCKS - old_blocks
    cache = jnp.pad(batch.kv_cache, ((0, 0), (0, extra), (0, 0), (0, 0), (0, 0)), constant_values=jnp.nan)
    out_of_range = meta.slot_mapping >= old_blocks * block_size
    meta = replace(
        meta,
        block_tables=jnp.pad(meta.block_tables, ((0, 0), (0, TABLE_WIDTH - meta.block_tables.shape[1]))),
        slot_mapping=jnp.where(out_of_range, CONTEXT_BLOCKS * block_size, meta.slot_mapping),
    )
    return replace(batch, kv_cache=cache, metadata=meta)


def make_batch(case: Case, rows: tuple[tuple[int, int], ...], seed: int) -> RaggedBatch:
    live = sum(new for _, new in rows)
    batch = fixed_shapes(
        ragged_batch(
            list(rows), heads=case.heads, kv_heads=case.kv_heads, head_size=case.head_size, dtype=case.dtype,
            block_size=case.block_size, seed=seed, pad_tokens=NUM_TOKENS - live, pad_rows=NUM_ROWS - len(rows),
        )
    )  # fmt: skip
    cache = in_cache_type(batch.kv_cache, case.kv_dtype or case.dtype)
    return replace(batch, kv_cache=cache, metadata=replace(batch.metadata, decode_only=case.decode_only))


def f32(array: jax.Array) -> np.ndarray:
    """For comparison: numpy does not take bfloat16's NaNs for equal."""
    return np.asarray(array, np.float32)


@functools.cache
def compiled(case: Case) -> Callable[..., Any]:
    """The interpreted backend: the cases' programs are compiled once."""
    backend = TpuAttentionBackend("v5e", interpret=strict(case.tiles.cores), tiles=case.tiles)
    update_and_attend = functools.partial(backend.update_and_attend, options=case.options)
    return jax.jit(update_and_attend, compiler_options=COMPILER_OPTIONS)


def run(case: Case, batch: RaggedBatch, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    cache = to_tpu_layout(batch.kv_cache)
    results = compiled(case)(batch.q, batch.k, batch.v, cache, batch.metadata, sinks=sinks)
    jax.block_until_ready(results)
    assert not races_found()
    return results


def check(case: Case, seed: int) -> None:
    oracle = jax.jit(
        functools.partial(
            ragged_paged_attention, scale=case.options.scale, sliding_window=case.options.sliding_window,
            soft_cap=case.options.soft_cap,
        )
    )  # fmt: skip
    sinks = None
    if case.sinks:
        sinks = jnp.asarray(np.random.default_rng(seed).standard_normal(case.heads), jnp.float32)
    for number, rows in enumerate(case.batches):
        batch = make_batch(case, rows, seed + number)
        out, cache = run(case, batch, sinks)
        expected_cache = kv_cache_update(batch.kv_cache, batch.k, batch.v, batch.metadata.slot_mapping)
        for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(to_tpu_layout(expected_cache))):
            np.testing.assert_array_equal(f32(ours), f32(theirs))
        expected = oracle(batch.q.astype(jnp.float32), expected_cache, batch.metadata, sinks=sinks)
        assert_close(out, expected, batch, RELATIVE_ERROR[case.dtype])


def assert_close(out: jax.Array, expected: jax.Array, batch: RaggedBatch, tolerance: float) -> None:
    """Relative error of every live token's heads together; padding tokens are zero."""
    out, expected = f32(out), f32(expected)
    live = int(batch.metadata.query_start_loc[-1])
    assert np.all(out[live:] == 0)
    for token in range(live):
        error = np.linalg.norm(out[token] - expected[token]) / np.linalg.norm(expected[token])
        assert error < tolerance, f"token {token}: relative error {error:.1e}"


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name):
    check(CASES[name], seed=len(name))


def test_a_row_does_not_depend_on_its_company():
    case = CASES["shared lanes"]
    company = make_batch(case, tuple(DECODE), seed=3)
    out, _ = run(case, company)
    kept = [1, 4]
    alone, _ = run(case, company.only_rows(kept))
    for new, old in enumerate(kept):
        np.testing.assert_array_equal(alone[new], out[old])


def test_empty_rows_among_live_ones():
    """A row without tokens, and one of no length, change nothing."""
    case = CASES["shared lanes"]
    batch = make_batch(case, ((33, 1), (1, 1), (20, 12)), seed=4)
    out, cache = run(case, batch)
    meta = batch.metadata

    def with_empty_row(values: jax.Array, fill: int) -> jax.Array:
        return jnp.insert(values, 2, fill, axis=0)[: values.shape[0]]

    starts = jnp.insert(meta.query_start_loc, 3, meta.query_start_loc[2])[: meta.query_start_loc.shape[0]]
    meta = replace(
        meta,
        seq_lens=with_empty_row(meta.seq_lens, 0),
        block_tables=with_empty_row(meta.block_tables, 0),
        query_start_loc=starts,
        distribution=meta.distribution + jnp.asarray([1, 1, 1], jnp.int32),
    )
    out_with, cache_with = run(case, replace(batch, metadata=meta))
    np.testing.assert_array_equal(out_with, out)
    np.testing.assert_array_equal(cache_with, cache)


def test_a_live_row_in_the_wrong_program_shows():
    """A decode-only program leaves rows with more queries out: NaN says so, zeros would not."""
    case = CASES["decoding rows alone"]
    out, _ = run(case, make_batch(case, ((33, 1), (20, 12)), seed=6))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1:13]).all()
    np.testing.assert_array_equal(out[13:], 0)


@pytest.mark.parametrize(
    "change,named",
    [
        ({"dtype": "float16"}, "float16"),
        ({"head_size": 320}, "head size 320"),
        ({"group": 17}, "groups of 17"),
        ({"block_size": 8}, "block size 8"),
        ({"options": AttentionOptions(0.1, sliding_window=0)}, "sliding window 0"),
    ],
)
def test_what_it_cannot_do_is_named_with_the_alternative(change, named):
    able = {
        "head_size": 64,
        "group": 4,
        "block_size": 16,
        "dtype": "bfloat16",
        "options": AttentionOptions(0.1),
    }
    assert supported(**able) is None
    reason = supported(**{**able, **change})
    assert named in reason
    assert "BlockedBackend" in reason


def test_float16_is_refused_when_traced():
    case = Case(4, 2, 64, dtype="float16")
    batch = make_batch(case, tuple(DECODE), seed=0)
    with pytest.raises(ValueError, match="float16"):
        run(case, batch)


def test_dispatch_chooses_it_for_tpus(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind="TPU v6 lite")])
    sizes = AttentionSizes(32, 8, 128, 128, jnp.bfloat16, jnp.bfloat16)
    options = [AttentionOptions(0.1)]
    assert attention_backend("tpu", sizes, options) == (TpuAttentionBackend("v6e"), None)
    assert attention_backend("cpu", sizes, options)[0].name == "blocked"
    half = replace(sizes, dtype=jnp.float16, kv_dtype=jnp.float16)
    backend, why_not = attention_backend("tpu", half, options)
    assert backend.name == "blocked"
    assert "float16" in why_not
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(device_kind="TPU v2")])
    with pytest.raises(ValueError, match=r"TPU v2.*blocked"):
        attention_backend("tpu", sizes, options)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices (virtual ones do)")
def test_heads_split_over_a_mesh():
    """Tensor parallelism: each device runs the kernels on its heads; the result is the same."""
    case = replace(CASES["shared lanes"], sinks=True)
    batch, mesh = make_batch(case, tuple(MIXED), seed=5), make_mesh(2)
    sinks = jnp.asarray([0.5, -1.0, 2.0, 0.0])
    expected = run(case, batch, sinks)
    backend = TpuAttentionBackend("v5e", interpret=strict(), tiles=case.tiles)
    heads, cache = PartitionSpec(None, "model"), PartitionSpec(None, None, "model")

    def layer(q, k, v, kv_cache, metadata, sinks):
        return backend.update_and_attend(q, k, v, kv_cache, metadata, case.options, sinks)

    specs = (heads, heads, heads, cache, PartitionSpec(), PartitionSpec("model"))
    split = jax.jit(
        jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(heads, cache), check_vma=False)
    )
    got = split(batch.q, batch.k, batch.v, to_tpu_layout(batch.kv_cache), batch.metadata, sinks)
    assert got[1].sharding.spec == PartitionSpec(None, None, "model")
    np.testing.assert_array_equal(got[1], expected[1])
    assert_close(got[0], expected[0], batch, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_equals_the_oracle_sweep(name):
    check(SLOW_CASES[name], seed=len(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed):
    """Random shapes and rows."""
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    block = int(rng.choice([16, 32]))
    batches = []
    for _ in range(3):
        decodes = [(int(rng.integers(1, 70)), 1) for _ in range(rng.integers(0, 4))]
        longer = [(int(rng.integers(12, 70)), int(rng.integers(2, 12))) for _ in range(rng.integers(0, 3))]
        batches.append(tuple(decodes + longer))
    case = Case(
        kv_heads * group,
        kv_heads,
        int(rng.choice([64, 80, 96, 128, 256])),
        block_size=block,
        dtype=str(rng.choice(["float32", "bfloat16"])),
        kv_dtype="float8_e4m3fn" if block == 32 and rng.random() < 0.5 else None,
        options=AttentionOptions(
            0.1,
            sliding_window=None if rng.random() < 0.5 else int(rng.integers(1, 60)),
            soft_cap=None if rng.random() < 0.5 else 4.0,
        ),
        sinks=bool(rng.random() < 0.5),
        tiles=replace(TILES, kv_chunk=block * int(rng.choice([1, 2, 4]))),
        batches=tuple(batches),
    )
    check(case, seed)

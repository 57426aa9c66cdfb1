"""The blocked implementation against the float32 oracle on fresh ragged batches."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import RaggedBatch, in_cache_type, ragged_batch

from pallas_kernels.dispatch import AttentionOptions, BlockedBackend
from pallas_kernels.kv_cache_update.quantized import (
    scale_in,
    scale_out,
    to_cache_type,
    values_of,
)
from pallas_kernels.kv_cache_update.reference import kv_cache_update
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention

pytestmark = pytest.mark.device

CASES = {
    "one decoding row": dict(rows=[(77, 1)]),
    "decode, lengths around block edges": dict(rows=[(15, 1), (16, 1), (17, 1), (1, 1), (300, 1)]),
    "one prompt": dict(rows=[(100, 100)]),
    "chunk after cached context": dict(rows=[(230, 70)]),
    "mixed": dict(rows=[(40, 1), (129, 1), (1, 1), (90, 90), (200, 33), (5, 2)]),
    "many rows": dict(rows=[(1 + 13 * i % 190, 1) for i in range(20)]),
    "no rows": dict(rows=[]),
    "a large step with short rows": dict(rows=[(30, 1), (7, 7), (3, 2), (64, 64)]),
    "a small step of mixed rows": dict(rows=[(30, 1), (1, 1), (150, 9), (6, 6), (20, 3)]),
}


@functools.cache
def step_of(options: AttentionOptions):
    return jax.jit(functools.partial(BlockedBackend().update_and_attend, options=options))


@functools.cache
def oracle_of(options: AttentionOptions):
    """Compiled whole: by itself, each of its operations would be compiled for each shape."""
    return jax.jit(
        functools.partial(
            ragged_paged_attention, scale=options.scale, sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
        )
    )  # fmt: skip


def run(batch: RaggedBatch, options: AttentionOptions, sinks: jax.Array | None = None):
    out, cache = step_of(options)(batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, sinks=sinks)
    cache_expected = jax.jit(kv_cache_update)(batch.kv_cache, batch.k, batch.v, batch.metadata.slot_mapping)
    expected = oracle_of(options)(batch.q, cache_expected, batch.metadata, sinks=sinks)
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(cache_expected)):
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
    return np.asarray(out, np.float32), np.asarray(expected, np.float32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads,kv_heads,head_size", [(6, 3, 64), (4, 4, 80), (16, 1, 128)])
def test_equals_the_oracle(name, heads, kv_heads, head_size):
    batch = ragged_batch(heads=heads, kv_heads=kv_heads, head_size=head_size, seed=len(name), **CASES[name])
    out, expected = run(batch, AttentionOptions(scale=head_size**-0.5))
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [8, 64, 256])  # test_random_batches has blocks of 16
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(scale=0.1, sliding_window=20),
        AttentionOptions(scale=0.1, sliding_window=150),
        AttentionOptions(scale=0.5, soft_cap=3.0),
        AttentionOptions(scale=0.1, sliding_window=9, soft_cap=5.0),
    ],
)
def test_options(block_size, options):
    batch = ragged_batch(rows=CASES["mixed"]["rows"], block_size=block_size, seed=block_size)
    out, expected = run(batch, options)
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype,error", [("float8_e4m3fn", 0.06), ("int8", 0.01)])
@pytest.mark.parametrize("name", ["mixed", "a small step of mixed rows"])
def test_caches_of_one_byte(name, dtype, error):
    """Equal to the oracle on the same cache, and near to attention over the cache that was rounded."""
    batch = ragged_batch(rows=CASES[name]["rows"], seed=6)
    options = AttentionOptions(scale=0.125, sliding_window=100)
    rounded = replace(batch, kv_cache=in_cache_type(batch.kv_cache, dtype))
    out, expected = run(rounded, options)
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)
    cache = kv_cache_update(batch.kv_cache, batch.k, batch.v, batch.metadata.slot_mapping)
    unrounded = ragged_paged_attention(batch.q, cache, batch.metadata, scale=0.125, sliding_window=100)
    assert 1e-4 < np.linalg.norm(out - unrounded) / np.linalg.norm(unrounded) < error


def test_scales_of_a_float8_cache():
    """Keys and values beyond float8's range fit when they are scaled, whatever the KV head; without, they saturate."""
    batch = ragged_batch(rows=CASES["mixed"]["rows"], seed=7)
    sizes, options = jnp.asarray([1.0, 900.0, 1 / 900]), AttentionOptions(scale=0.125)
    k_scale, v_scale = sizes / 100, sizes[::-1] / 100
    big = replace(
        batch,
        q=batch.q / jnp.repeat(sizes, 2)[:, None],
        k=batch.k * sizes[:, None],
        v=batch.v * sizes[::-1, None],
    )
    fresh = replace(batch, kv_cache=in_cache_type(batch.kv_cache * 100, "float8_e4m3fn"))
    q, k, v = scale_in(big.q, big.k, big.v, k_scale, v_scale)
    out, _ = run(replace(fresh, q=q, k=k, v=v), options)
    out = scale_out(jnp.asarray(out), v_scale, 3)
    cache = kv_cache_update(fresh.kv_cache, k, v, batch.metadata.slot_mapping)
    expected = ragged_paged_attention(
        big.q, cache, batch.metadata, scale=0.125, k_scale=k_scale, v_scale=v_scale
    )
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=1e-5 * float(jnp.abs(expected).max()))
    assert not np.isnan(
        np.asarray(to_cache_type(jnp.asarray([1e6, -1e6]), "float8_e4m3fn"), np.float32)
    ).any()


def test_sinks():
    batch = ragged_batch(rows=CASES["mixed"]["rows"], seed=5)
    sinks = jnp.asarray(np.random.default_rng(5).standard_normal(batch.q.shape[1]), jnp.float32)
    out, expected = run(batch, AttentionOptions(scale=0.125), sinks)
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    batch = ragged_batch(rows=CASES["mixed"]["rows"], seed=8, dtype=dtype)
    out, expected = run(batch, AttentionOptions(scale=0.125, soft_cap=5.0))
    assert np.linalg.norm(out - expected) / np.linalg.norm(expected) < 5e-3


BLOCK, SWEEP_TOKENS, SWEEP_ROWS, SWEEP_WIDTH, SWEEP_BLOCKS = 16, 96, 8, 12, 70


def border(draw, low: int, high: int) -> int:
    """A length in [low, high], near a border of a block more often than not."""
    near = draw(st.integers(0, high // BLOCK)) * BLOCK + draw(st.integers(-1, 1))
    return near if low <= near <= high and draw(st.integers(0, 3)) else draw(st.integers(low, high))


@st.composite
def random_rows(draw) -> list[tuple[int, int]]:
    decodes = [(border(draw, 1, 150), 1) for _ in range(draw(st.integers(0, 4)))]
    longer = []
    for _ in range(draw(st.integers(0, 3))):
        new = border(draw, 2, 26)
        longer.append((new + border(draw, 0, 120), new))
    return decodes + longer


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=random_rows(), seed=st.integers(0, 2**31), sinks=st.booleans(),
    options=st.sampled_from([AttentionOptions(0.125), AttentionOptions(0.3, sliding_window=17, soft_cap=4.0)]),
)  # fmt: skip
def test_random_batches(rows, seed, sinks, options):
    """Against the oracle, in float32; rows, contents and blocks are fresh, NaN is where nothing was written."""
    live = sum(new for _, new in rows)
    batch = ragged_batch(
        rows, heads=6, kv_heads=2, block_size=BLOCK, seed=seed, pad_tokens=SWEEP_TOKENS - live,
        pad_rows=SWEEP_ROWS - len(rows), width=SWEEP_WIDTH, num_blocks=SWEEP_BLOCKS,
    )  # fmt: skip
    logits = jnp.linspace(-3.0, 3.0, 6) if sinks else jnp.full(6, -1e30)
    step, oracle = step_of(options), oracle_of(options)
    out, cache = step(batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, sinks=logits)
    expected_cache = kv_cache_update(batch.kv_cache, batch.k, batch.v, batch.metadata.slot_mapping)
    np.testing.assert_array_equal(cache, expected_cache)
    expected = oracle(batch.q, expected_cache, batch.metadata, sinks=logits)
    np.testing.assert_array_equal(out[live:], 0)
    for token in range(live):
        error = np.linalg.norm(out[token] - expected[token]) / np.linalg.norm(expected[token])
        assert error < 1e-5, f"token {token}: relative error {error:.1e}"


def test_a_row_does_not_depend_on_its_company():
    options = AttentionOptions(scale=0.125)
    company = ragged_batch(rows=[(50, 1), (130, 1), (260, 1), (70, 70)], seed=3)
    out, _ = run(company, options)
    for drop in (0, 2):
        kept = [r for r in (0, 1, 2) if r != drop]
        alone, _ = run(company.only_rows(kept), options)
        for new, old in enumerate(kept):
            np.testing.assert_array_equal(alone[new], out[old])


@pytest.mark.parametrize(
    "rows,pad_tokens,dtype",
    [
        ([(40, 1)], 0, "float32"), ([(40, 1)] * 8, 0, "float32"), ([(100, 100)], 28, "float32"),
        ([(100, 100)], 28, "bfloat16"), ([(100, 100)], 28, "float8_e4m3fn"), ([(40, 1)], 0, "int8"),
    ],
)  # fmt: skip
def test_the_donated_cache_is_not_copied(rows, pad_tokens, dtype):
    batch = ragged_batch(rows=rows, pad_tokens=pad_tokens, pad_rows=0)
    batch = replace(batch, kv_cache=in_cache_type(batch.kv_cache, dtype))
    step = jax.jit(BlockedBackend().update_and_attend, static_argnums=5, donate_argnums=3)
    compiled = step.lower(
        batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, AttentionOptions(scale=0.125)
    ).compile()
    text = compiled.as_text()
    arrays = jax.tree.leaves(batch.kv_cache)
    values = values_of(batch.kv_cache)
    shapes = {array.shape for array in arrays} | {(math.prod(values.shape[:3]), *values.shape[3:])}
    for shape in shapes:  # of whatever type: one of one byte might be widened
        of_shape = rf"= \w+\[{','.join(map(str, shape))}\]\S* "
        assert not re.findall(of_shape + r"(?:copy|convert|transpose)\(.*", text)
    assert text.count("may-alias") + text.count("must-alias") >= len(arrays)

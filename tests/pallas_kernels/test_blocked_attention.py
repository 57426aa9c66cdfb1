"""The blocked implementation against the float32 oracle on fresh ragged batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_batches import RaggedBatch, ragged_batch

from pallas_kernels.dispatch import AttentionOptions, BlockedBackend
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


def run(batch: RaggedBatch, options: AttentionOptions, sinks: jax.Array | None = None):
    out, cache = jax.jit(BlockedBackend().update_and_attend, static_argnums=5)(
        batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, options, sinks
    )
    cache_expected = kv_cache_update(batch.kv_cache, batch.k, batch.v, batch.metadata.slot_mapping)
    expected = ragged_paged_attention(
        batch.q, cache_expected, batch.metadata, scale=options.scale, sliding_window=options.sliding_window,
        soft_cap=options.soft_cap, sinks=sinks,
    )  # fmt: skip
    np.testing.assert_array_equal(cache, cache_expected)
    return np.asarray(out, np.float32), np.asarray(expected, np.float32)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("heads,kv_heads,head_size", [(6, 3, 64), (4, 4, 80), (16, 1, 128)])
def test_equals_the_oracle(name, heads, kv_heads, head_size):
    batch = ragged_batch(heads=heads, kv_heads=kv_heads, head_size=head_size, seed=len(name), **CASES[name])
    out, expected = run(batch, AttentionOptions(scale=head_size**-0.5))
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
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


def test_sinks():
    batch = ragged_batch(rows=CASES["mixed"]["rows"], seed=5)
    sinks = jnp.asarray(np.random.default_rng(5).standard_normal(batch.q.shape[1]), jnp.float32)
    out, expected = run(batch, AttentionOptions(scale=0.125), sinks)
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)


def test_a_row_does_not_depend_on_its_company():
    options = AttentionOptions(scale=0.125)
    company = ragged_batch(rows=[(50, 1), (130, 1), (260, 1), (70, 70)], seed=3)
    out, _ = run(company, options)
    for drop in (0, 2):
        kept = [r for r in (0, 1, 2) if r != drop]
        alone, _ = run(company.only_rows(kept), options)
        for new, old in enumerate(kept):
            np.testing.assert_array_equal(alone[new], out[old])


@pytest.mark.parametrize("rows,pad_tokens", [([(40, 1)], 0), ([(40, 1)] * 8, 0), ([(100, 100)], 28)])
def test_the_donated_cache_is_not_copied(rows, pad_tokens):
    batch = ragged_batch(rows=rows, pad_tokens=pad_tokens, pad_rows=0)
    step = jax.jit(BlockedBackend().update_and_attend, static_argnums=5, donate_argnums=3)
    compiled = step.lower(
        batch.q, batch.k, batch.v, batch.kv_cache, batch.metadata, AttentionOptions(scale=0.125)
    ).compile()
    shape = ",".join(map(str, batch.kv_cache.shape))
    copies = [
        line for line in compiled.as_text().splitlines() if f"f32[{shape}]" in line and " copy(" in line
    ]
    assert not copies

"""The Hopper backend on a Hopper GPU against the oracle, for each cache type: ``JAX_PLATFORMS=cuda pytest -m gpu``."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_batches import in_cache_type, ragged_batch

from pallas_kernels.kv_cache_update.reference import kv_cache_update
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention


def is_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")]

ROWS = [(1, 1), (64, 1), (700, 1), (1500, 1), (1200, 300), (150, 33), (513, 513), (9, 2)]
SHAPES = [
    (32, 8, 128, 16),
    (14, 2, 64, 32),
    (8, 8, 80, 64),
    (10, 2, 96, 128),
    (16, 1, 256, 256),
    (15, 3, 128, 64),
]
OPTIONS = {
    "plain": AttentionOptions(0.1),
    "window and cap": AttentionOptions(0.1, sliding_window=300, soft_cap=10.0),
}


def sample_of(metadata: AttentionMetadata) -> tuple[np.ndarray, AttentionMetadata]:
    """Some query tokens of every row, its first and last among them, and the batch of these alone.

    The oracle gathers a whole context for each of them, and several processes share the GPU.
    """
    starts = np.asarray(metadata.query_start_loc)
    each = [np.linspace(a, b - 1, min(b - a, 24)).astype(int) for a, b in itertools.pairwise(starts) if b > a]
    sample = np.concatenate(each)
    return sample, replace(
        metadata, positions=metadata.positions[sample], row_ids=metadata.row_ids[sample],
        query_start_loc=jnp.full_like(metadata.query_start_loc, len(sample)), decode_only=False,
    )  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("decode_only", [True, False])
def test_equals_the_oracle(shape, name, kv_dtype, decode_only):
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend

    heads, kv_heads, head_size, block_size = shape
    rows = [row for row in ROWS if row[1] == 1] if decode_only else ROWS
    batch = ragged_batch(
        rows, heads=heads, kv_heads=kv_heads, head_size=head_size, block_size=block_size, dtype=jnp.bfloat16
    )
    batch = replace(batch, kv_cache=in_cache_type(batch.kv_cache, kv_dtype))
    batch = replace(batch, metadata=replace(batch.metadata, decode_only=decode_only))
    backend, options = GpuBackend(), OPTIONS[name]
    stored = backend.kv_cache_shape(1, block_size, kv_heads, head_size)[-1]
    cache = jnp.pad(batch.kv_cache, [(0, 0)] * 4 + [(0, stored - head_size)])
    sinks = jnp.linspace(-1.0, 3.0, heads)
    step = jax.jit(backend.update_and_attend, static_argnums=5)
    expected_cache = kv_cache_update(batch.kv_cache, batch.k, batch.v, batch.metadata.slot_mapping)
    sample, few = sample_of(batch.metadata)
    expected = ragged_paged_attention(
        batch.q[sample].astype(jnp.float32), expected_cache, few, scale=options.scale, sinks=sinks,
        sliding_window=options.sliding_window, soft_cap=options.soft_cap,
    )  # fmt: skip
    for _ in range(3):
        out, new_cache = step(batch.q, batch.k, batch.v, cache, batch.metadata, options, sinks)
        found = np.asarray(new_cache[..., :head_size], np.float32)
        np.testing.assert_array_equal(found, np.asarray(expected_cache, np.float32))
        out, wanted = np.asarray(out[sample], np.float32), np.asarray(expected, np.float32)
        assert np.linalg.norm(out - wanted) / np.linalg.norm(wanted) < 5e-3

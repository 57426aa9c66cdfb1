"""Latent attention: the blocked implementation against the float32 oracle on fresh ragged batches."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_batches import ragged_batch

from pallas_kernels.kv_cache_update.reference import kv_cache_update
from pallas_kernels.mla_attention.dispatch import BlockedLatentBackend, latent_backend
from pallas_kernels.mla_attention.reference import latent_attention, latent_update
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.reference import ragged_paged_attention

pytestmark = pytest.mark.device

CASES = {
    "decode, lengths around block edges": dict(rows=[(15, 1), (16, 1), (17, 1), (1, 1), (300, 1)]),
    "a small step of mixed rows": dict(rows=[(30, 1), (1, 1), (150, 9), (6, 6), (20, 3)]),
    "mixed": dict(rows=[(40, 1), (129, 1), (1, 1), (90, 90), (200, 33), (5, 2)]),
    "chunk after cached context, large blocks": dict(rows=[(330, 70)], block_size=256),
    "no rows": dict(rows=[]),
    "one token, no padding": dict(rows=[(9, 1)], pad_tokens=0, pad_rows=0),
}
LATENT, VALUE, SCALE = 40, 24, 0.3


def latent_batch(dtype=jnp.float32, **case):
    """A batch, and its cache as one of latents: the keys of its only head, [num_blocks, block_size, C]."""
    batch = ragged_batch(heads=6, kv_heads=1, head_size=LATENT, seed=len(str(case)), dtype=dtype, **case)
    return batch, batch.kv_cache[0, :, 0], batch.k[:, 0]


@pytest.mark.parametrize(
    "name, lanes",
    [
        ("decode, lengths around block edges", 1),
        ("mixed", 128),
        ("one token, no padding", 128),
        *(
            pytest.param(name, lanes, marks=pytest.mark.slow)
            for name, lanes in (
                ("a small step of mixed rows", 128),
                ("chunk after cached context, large blocks", 1),
                ("no rows", 128),
            )
        ),
    ],
)
def test_equals_the_oracle(name: str, lanes: int) -> None:
    batch, cache, latents = latent_batch(**CASES[name])
    backend = BlockedLatentBackend(lanes, as_integers=lanes == 1)
    stored = backend.kv_cache_shape(*cache.shape[:2], 1, LATENT)[-1]
    assert stored == (LATENT if lanes == 1 else 128)
    wide = jnp.pad(cache, ((0, 0), (0, 0), (0, stored - LATENT)), constant_values=jnp.nan)
    attend = jax.jit(partial(backend.update_and_attend, scale=SCALE, value_size=VALUE))
    out, updated = attend(batch.q, latents, wide, batch.metadata)
    expected_cache = latent_update(cache, latents, batch.metadata.slot_mapping)
    expected = latent_attention(batch.q, expected_cache, batch.metadata, scale=SCALE, value_size=VALUE)
    assert out.shape == (batch.q.shape[0], 6, VALUE)
    np.testing.assert_array_equal(updated[..., :LATENT], expected_cache)
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=1e-5)


def test_the_oracle_is_attention_of_one_head() -> None:
    """Of keys whose first elements are the values."""
    batch, cache, latents = latent_batch(**CASES["mixed"])
    both = kv_cache_update(batch.kv_cache, batch.k, batch.k, batch.metadata.slot_mapping)
    both = both.at[1].set(both[0])
    expected = ragged_paged_attention(batch.q, both, batch.metadata, scale=SCALE)[..., :VALUE]
    cache = latent_update(cache, latents, batch.metadata.slot_mapping)
    found = latent_attention(batch.q, cache, batch.metadata, scale=SCALE, value_size=VALUE)
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["one token, no padding", pytest.param("mixed", marks=pytest.mark.slow)])
def test_the_cache_is_updated_in_place(name: str) -> None:
    """In bfloat16, which XLA's CPU would widen, and for one token, which it would slice."""
    batch, cache, latents = latent_batch(jnp.bfloat16, **CASES[name])
    cache = jnp.pad(cache, ((0, 400), (0, 0), (0, 0)))
    attend = partial(BlockedLatentBackend().update_and_attend, scale=SCALE, value_size=VALUE)
    compiled = jax.jit(attend, donate_argnums=2).lower(batch.q, latents, cache, batch.metadata).compile()
    text = compiled.as_text()
    shape = ",".join(map(str, cache.shape))
    assert not re.findall(rf"= \w+\[{shape}\]\S* (?:copy|convert|transpose)\(.*", text)
    assert "may-alias" in text or "must-alias" in text
    out, _ = compiled(batch.q, latents, cache, batch.metadata)
    assert out.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_every_platform_has_a_backend() -> None:
    assert latent_backend("cpu") == (BlockedLatentBackend(), None)
    for platform, stored in (("gpu", 576), ("tpu", 640)):
        backend, why_not = latent_backend(platform)
        assert backend.kv_cache_shape(7, 16, 1, 576) == (7, 16, stored)
        assert why_not == f"there is no {platform.upper()} kernel for latent attention (MLA) yet"


@pytest.mark.tpu_aot
@pytest.mark.timeout(900)
def test_tpus_do_not_copy_the_cache() -> None:
    """DeepSeek-V3's sizes, compiled ahead of time: what a layer needs is small beside its cache."""
    pytest.importorskip("libtpu", reason="libtpu, the TPU's compiler, is not installed (the tpu extra)")
    from jaxserve.plan.hardware import find_topology

    device = jax.sharding.SingleDeviceSharding(find_topology("v6e-4").devices()[0])
    tokens, width, num_blocks = 128, 64, 3000

    def abstract(*shape: int, dtype: object = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    each = abstract(tokens)
    metadata = AttentionMetadata(
        each, abstract(tokens, width), abstract(tokens + 1), abstract(3), each, each, each
    )
    backend, _ = latent_backend("tpu")
    q, latents, cache = (
        abstract(*shape, dtype=jnp.bfloat16)
        for shape in ((tokens, 16, 576), (tokens, 576), backend.kv_cache_shape(num_blocks, 128, 1, 576))
    )
    attend = jax.jit(partial(backend.update_and_attend, scale=0.1, value_size=512), donate_argnums=2)
    memory = attend.lower(q, latents, cache, metadata).compile().memory_analysis()
    cache_bytes = num_blocks * 128 * 640 * 2
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 8

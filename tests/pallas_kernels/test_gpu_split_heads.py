"""Norm, rotation and parting of heads by one Hopper kernel, in interpret mode, beside the layers' own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.rope import RopeAngles
from pallas_kernels.rms_norm.dispatch import PLAIN

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need jax >= 0.11"),
]


@pytest.mark.parametrize(
    "num_tokens, kv_heads, group, norm", [(1, 2, 2, True), (5, 1, 4, False), (3, 4, 8, True)]
)
def test_it_does_what_the_layers_do(num_tokens, kv_heads, group, norm):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.split_heads.gpu import MOST_TOKENS, GpuSplitHeads

    rng = np.random.default_rng(num_tokens)
    qkv = jnp.asarray(3 * rng.normal(size=(num_tokens, kv_heads, group + 2, 128)), jnp.bfloat16)
    frequencies = (1e4 ** (-np.arange(64) / 64)).astype(np.float32)
    rope = RopeAngles.at(jnp.asarray(rng.integers(0, 5000, num_tokens), jnp.int32), frequencies, 1.0)
    query, key = jnp.asarray(rng.normal(size=(2, 1, 128)), jnp.bfloat16)
    weights = jnp.concatenate([jnp.repeat(query, group, axis=0), key]) if norm else None
    kernel = GpuSplitHeads(num_sms=2, ctas_per_sm=3, interpret=plgpu.InterpretGPUParams())
    assert kernel.why_not(num_tokens, 128, qkv.dtype) is None
    assert "64" in (kernel.why_not(num_tokens, 64, qkv.dtype) or "")
    assert str(MOST_TOKENS + 1) in (kernel.why_not(MOST_TOKENS + 1, 128, qkv.dtype) or "")
    found = kernel(qkv, rope.cos[:, 0, 0], rope.sin[:, 0, 0], weights, 1e-6)
    qk, v = qkv[:, :, :-1], qkv[:, :, -1]
    qk = rope.rotate(qk if weights is None else PLAIN(qk, weights, 1e-6))
    expected = qk[:, :, :-1].reshape(num_tokens, -1, 128), qk[:, :, -1], v
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        wide = np.asarray(theirs, np.float32)
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), wide, rtol=2**-6, atol=2**-6 * np.abs(wide).mean()
        )


@pytest.mark.parametrize("norm", [False, True])
def test_one_kernel_serves_all_numbers_of_tokens(norm):
    from pallas_kernels.split_heads.gpu import GpuSplitHeads

    def lowered(num_tokens: int) -> str:
        struct = jax.ShapeDtypeStruct
        weights = struct((5, 128), jnp.bfloat16) if norm else None
        angles = struct((num_tokens, 64), jnp.float32)
        split = jax.jit(
            lambda qkv, cos, sin, weights: GpuSplitHeads(num_sms=132)(qkv, cos, sin, weights, 1e-6)
        )
        traced = split.trace(struct((num_tokens, 8, 6, 128), jnp.bfloat16), angles, angles, weights)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu_v2") == 1
        return text.split('kernel_hash = "')[1].split('"')[0]

    assert lowered(1) == lowered(64)

"""The Hopper cache write against the oracle, interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_interpreter import forbid_copies_out_of_bounds, needs_mosaic_gpu, run, strict, unexpected_races

from pallas_kernels.kv_cache_update import gpu, reference

pytestmark = [pytest.mark.device, needs_mosaic_gpu]


@pytest.mark.parametrize(
    "live,num_tokens,kv_heads,dtype",
    [
        (0, 3, 2, "bfloat16"),
        (1, 1, 2, "bfloat16"),
        (5, 5, 2, "float8_e4m3fn"),
        (21, 32, 2, "float16"),
        (50, 50, 2, "bfloat16"),
        (3, 3, 1, "float8_e4m3fn"),
        (30, 32, 3, "int8"),
    ],
)
def test_writes_live_tokens_and_nothing_else(live, num_tokens, kv_heads, dtype, capsys, monkeypatch):
    forbid_copies_out_of_bounds(monkeypatch)
    rng = np.random.default_rng(live)
    num_blocks, block_size, head_size = 9, 8, 64
    poison = 111 if dtype == "int8" else jnp.nan
    cache = jnp.full((2, num_blocks, kv_heads, block_size, head_size), poison, dtype)
    k, v = (jnp.asarray(9 * rng.standard_normal((num_tokens, kv_heads, head_size)), dtype) for _ in "kv")
    slots = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int32)
    slots[live:] = num_blocks * block_size
    if live > 3:
        slots[2] = -1  # dropped, though among live ones
    k, v = (x.at[live:].set(poison) for x in (k, v))

    def write(cache, k, v, slots, live):
        ref = jax.new_ref(cache)
        gpu.kv_cache_update(ref, k, v, slots, live, num_sms=1, interpret=strict())
        return jax.freeze(ref)

    written = run(write, cache, k, v, jnp.asarray(slots), jnp.asarray([live], jnp.int32))
    slots[slots < 0] = num_blocks * block_size
    expected = reference.kv_cache_update(cache, k, v, jnp.asarray(slots))
    np.testing.assert_array_equal(np.asarray(written, np.float32), np.asarray(expected, np.float32))
    assert not unexpected_races(capsys.readouterr().out)

"""One kernel for every batch size: the same module in programs of different sizes, over their own arrays."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need jax >= 0.11"),
]
HEADS, KV_HEADS, HEAD_SIZE, BLOCK, NUM_BLOCKS = 8, 2, 64, 16, 32


def lowered(num_tokens: int, num_rows: int, *, decode_only: bool) -> str:
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend

    backend = GpuBackend(num_sms=4)
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    metadata = AttentionMetadata(
        seq_lens=int32((num_rows,)), block_tables=int32((num_rows, 8)), query_start_loc=int32((num_rows + 1,)),
        distribution=int32((3,)), slot_mapping=int32((num_tokens,)), positions=int32((num_tokens,)),
        row_ids=int32((num_tokens,)), decode_only=decode_only,
    )  # fmt: skip
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    new = array((num_tokens, KV_HEADS, HEAD_SIZE))
    cache = array(backend.kv_cache_shape(NUM_BLOCKS, BLOCK, KV_HEADS, HEAD_SIZE))

    def layer(q, k, v, cache, metadata):
        return backend.update_and_attend(q, k, v, cache, metadata, AttentionOptions(HEAD_SIZE**-0.5))

    traced = jax.jit(layer, donate_argnums=3).trace(
        array((num_tokens, HEADS, HEAD_SIZE)), new, new, cache, metadata
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def hashes(text: str) -> set[str]:
    return set(re.findall(r'kernel_hash = "([^"]*)"', text))


def test_programs_of_all_sizes_share_their_kernels():
    decode = {size: hashes(lowered(size, size, decode_only=True)) for size in (1, 8, 64)}
    assert len(set.union(*decode.values())) == 1
    mixed = {size: hashes(lowered(size, 8, decode_only=False)) for size in (64, 128, 1024)}
    assert {len(each) for each in mixed.values()} == {3}
    assert len(set.union(*mixed.values())) == 3


def test_the_calls_take_the_programs_own_arrays():
    text = lowered(64, 8, decode_only=False)
    calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu_v2" in line]
    assert len(calls) == 3
    for call in calls:
        signature = call.rsplit(" : ", 1)[1]
        assert f"{2}x{NUM_BLOCKS}x{KV_HEADS}x{BLOCK}x{HEAD_SIZE}xbf16" in signature
        assert "65536" not in signature
        assert "output_operand_alias" in call


def test_a_larger_batch_gets_its_own_kernel(monkeypatch):
    from pallas_kernels.mosaic_gpu import launch as gpu_launch

    monkeypatch.setattr(gpu_launch, "MOST", 32)
    small, large = (hashes(lowered(size, size, decode_only=True)) for size in (16, 64))
    assert len(small) == len(large) == 1
    assert small != large

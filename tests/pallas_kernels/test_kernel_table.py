"""What the backends say they can do they do: each answer of docs/kernels.md is tried on the compiler's front end."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gpu_interpreter import needs_mosaic_gpu

from pallas_kernels.dispatch import AttentionMetadata
from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul
from pallas_kernels.grouped_matmul.tpu import TpuGroupedMatmul
from pallas_kernels.kv_cache_update.quantized import abstract_cache
from pallas_kernels.ragged_paged_attention.gpu import GpuBackend
from pallas_kernels.ragged_paged_attention.tpu import TpuAttentionBackend

pytestmark = pytest.mark.device

ROOT = Path(__file__).parents[2]
ROWS, TOKENS, WIDTH, BLOCKS, KV_HEADS = 4, 80, 4, 20, 2


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("kernel_table", ROOT / "scripts" / "write_kernel_table.py")
    assert spec is not None
    assert spec.loader is not None
    import sys

    module = sys.modules["kernel_table"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLE = load_script()
CASES = {f"{label}: {name}": case for label, cases in TABLE.ROWS.items() for name, case in cases.items()}
ABLE = {
    backend: {name: case for name, case in CASES.items() if TABLE.BACKENDS[backend](case) is None}
    for backend in TABLE.BACKENDS
}


def trace(backend: Any, case: Any, decode_only: bool) -> Any:
    """One layer's update and attention, traced."""
    tokens = ROWS if decode_only else TOKENS
    int32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    metadata = AttentionMetadata(
        int32((ROWS,)), int32((ROWS, WIDTH)), int32((ROWS + 1,)), int32((3,)), int32((tokens,)), int32((tokens,)),
        int32((tokens,)), decode_only=decode_only,
    )  # fmt: skip
    heads = KV_HEADS * case.group
    q, k = (jax.ShapeDtypeStruct((tokens, n, case.head_size), case.dtype) for n in (heads, KV_HEADS))
    shape = backend.kv_cache_shape(BLOCKS, case.block_size, KV_HEADS, case.head_size)
    cache = abstract_cache(shape, case.kv_dtype, BLOCKS, case.block_size)
    sinks = jax.ShapeDtypeStruct((heads,), jnp.float32) if case.sinks else None

    def layer(q, k, v, cache, metadata, sinks):
        return backend.update_and_attend(q, k, v, cache, metadata, case.options, sinks)

    return jax.jit(layer, donate_argnums=3).trace(q, k, k, cache, metadata, sinks)


def test_the_page_is_current():
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert page == TABLE.kernels_page(), "run: python scripts/write_kernel_table.py"


@pytest.mark.parametrize(
    "name,backend", [("TPU", TpuAttentionBackend("v6e")), ("Hopper", GpuBackend(num_sms=132))]
)
def test_what_is_refused_is_refused_by_the_backend_itself(name, backend):
    refused = set(CASES) - set(ABLE[name])
    assert refused
    for case in refused:
        reason = TABLE.BACKENDS[name](CASES[case])
        assert "portable" in reason
        with pytest.raises(ValueError) as info:
            trace(backend, CASES[case], decode_only=True)
        assert str(info.value) == reason


EXPERTS = [case for cases in TABLE.EXPERT_ROWS.values() for case in cases.values()]


@pytest.mark.parametrize(
    "kernel,column", [(TpuGroupedMatmul("v6e"), "TPU (v6e)"), (GpuGroupedMatmul(num_sms=132), "Hopper")]
)
def test_what_experts_are_refused_is_refused_by_the_kernel_itself(kernel, column):
    refused = 0
    for case in EXPERTS:
        outputs, inner, dtype = case
        reason = TABLE.EXPERT_KERNELS[column](case)
        if reason is not None:
            refused += 1
            with pytest.raises(ValueError, match=re.escape(reason)):
                kernel(
                    jnp.zeros((1, inner), dtype),
                    jnp.zeros((1, outputs, inner), dtype),
                    jnp.zeros(1, jnp.int32),
                )
    assert refused


@pytest.mark.slow
@pytest.mark.parametrize("case", ABLE["TPU"])
def test_the_tpu_kernels_lower(case):
    traced = trace(TpuAttentionBackend("v6e"), CASES[case], decode_only=False)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("@tpu_custom_call") == 2


ALWAYS = (
    "head size: 80", "head size: 96", "query heads a KV head: 3", "query heads a KV head: 5",
    "query heads a KV head: 7", "query heads a KV head: 13", "block size: 8", "float8 cache, queries: float16",
    "options: all",
)  # fmt: skip


@needs_mosaic_gpu
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in ABLE["Hopper"]]
)
def test_the_hopper_kernels_lower(case):
    traced = trace(GpuBackend(num_sms=132), CASES[case], decode_only=True)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1


@pytest.mark.slow
@needs_mosaic_gpu
@pytest.mark.parametrize("case", ABLE["Hopper"])
def test_the_hopper_prefill_kernels_lower(case):
    traced = trace(GpuBackend(num_sms=132), CASES[case], decode_only=False)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 3


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(ABLE["portable (CPU, any device)"]) - set(ABLE["TPU"])))
def test_the_portable_path_does_what_a_tpu_refuses(case):
    from pallas_kernels.dispatch import BlockedBackend

    out, _ = trace(BlockedBackend(), CASES[case], decode_only=False).out_info
    assert out.dtype == CASES[case].dtype

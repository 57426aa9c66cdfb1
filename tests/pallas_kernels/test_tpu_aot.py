"""The TPU kernels, and whole steps of an 8B Llama over four devices, compiled ahead of time by the TPU's compiler.

Says that every generation's compiler takes them, within its VMEM and SMEM, and that the donated cache is not copied;
nothing about speed. Run with ``-s`` to see compile times and memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from step_programs import step_programs

from jaxserve.models import build
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_variants import StepVariant
from jaxserve.sampling.metadata import ALL_FEATURES, Feature
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions
from pallas_kernels.grouped_matmul.tpu import TpuGroupedMatmul
from pallas_kernels.kv_cache_update.quantized import ScaledCache, abstract_cache
from pallas_kernels.ragged_paged_attention.tpu import TpuAttentionBackend, supported
from sharding import make_mesh

libtpu = pytest.importorskip("libtpu", reason="libtpu, the TPU's compiler, is not installed (the tpu extra)")

pytestmark = [pytest.mark.device, pytest.mark.tpu_aot, pytest.mark.timeout(1800)]

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

LLAMA_8B = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "models" / "llama-8b" / "config.json").read_text()
)
DECODE = Bucket(num_tokens=64, num_rows=64)
PREFILL = Bucket(num_tokens=2048, num_rows=64)
NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN = 4096, 16, 64, 8192


def devices(generation: str) -> list[Any]:
    """A topology's devices. No TPU is touched, so libtpu need not ask the cloud for one, nor own it alone."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(topology_name=TOPOLOGIES[generation], platform="tpu").devices


def compile_and_report(name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    started = time.monotonic()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    print(
        f"\n{name}: compiled in {time.monotonic() - started:.1f} s; MiB a device: "
        f"arguments {memory.argument_size_in_bytes / 2**20:.1f}, outputs {memory.output_size_in_bytes / 2**20:.1f}, "
        f"aliased {memory.alias_size_in_bytes / 2**20:.1f}, temporaries {memory.temp_size_in_bytes / 2**20:.1f}"
    )
    return compiled


def assert_cache_not_copied(
    compiled: jax.stages.Compiled, local_shape: tuple[int, ...], caches: int, dtype: str
):
    """The donated caches are aliased to the results, and no operation copies an array of their shape."""
    element = {"bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "f8e4m3fn", "int8": "s8"}[dtype]
    shape = re.escape(f"{element}[{','.join(map(str, local_shape))}]")
    text = compiled.as_text()
    assert re.search(shape, text), "the cache's shape is not in the HLO"
    made = {
        line.strip()
        for line in text.splitlines()
        if re.search(
            rf"= \(?{shape}\S* (copy|copy-start|fusion|transpose|scatter|dynamic-update-slice)\(", line
        )
    }
    assert not made
    size = caches * math.prod(local_shape) * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    assert text.count("must-alias") + text.count("may-alias") >= caches
    kernels = re.findall(r"= (\S+) custom-call\([^\n]*tpu_custom_call", text)
    assert len(kernels) >= 2 * caches
    assert not [result for result in kernels if "S(1)" in result], (
        "XLA put into VMEM what the kernels expect in HBM"
    )


def compile_kernels(
    generation: str, tokens: int, rows: int, heads: int, kv_heads: int, head_size: int, block_size: int, dtype: str,
    options: AttentionOptions, width: int, kv_dtype: str | None = None, *, check_scales: bool = False,
) -> None:  # fmt: skip
    mesh = make_mesh(1, devices(generation))
    whole = NamedSharding(mesh, PartitionSpec())
    abstract = partial(jax.ShapeDtypeStruct, sharding=whole)
    int32 = partial(abstract, dtype=jnp.int32)
    backend = TpuAttentionBackend(generation)
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    assert supported(head_size, heads // kv_heads, block_size, dtype, options, kv_dtype) is None
    metadata = AttentionMetadata(
        seq_lens=int32((rows,)), block_tables=int32((rows, width)), query_start_loc=int32((rows + 1,)),
        distribution=int32((3,)), slot_mapping=int32((tokens,)), positions=int32((tokens,)), row_ids=int32((tokens,)),
    )  # fmt: skip
    cache_shape = backend.kv_cache_shape(256, block_size, kv_heads, head_size)
    q, kv = abstract((tokens, heads, head_size), dtype), abstract((tokens, kv_heads, head_size), dtype)
    sinks = abstract((heads,), jnp.float32)

    def layer(q, k, v, cache, metadata, sinks):
        return backend.update_and_attend(q, k, v, cache, metadata, options, sinks)

    cache = jax.tree.map(
        lambda leaf: abstract(leaf.shape, leaf.dtype), abstract_cache(cache_shape, kv_dtype, 256, block_size)
    )
    lowered = jax.jit(layer, donate_argnums=3).lower(q, kv, kv, cache, metadata, sinks)
    name = f"{generation} T={tokens} H={heads} K={kv_heads} D={head_size} block={block_size} {dtype}"
    compiled = compile_and_report(f"{name}, {kv_dtype} cache", lowered)
    assert_cache_not_copied(compiled, cache_shape, 1, kv_dtype)
    if isinstance(cache, ScaledCache) and check_scales:
        shape = re.escape(f"f32[{','.join(map(str, cache.scales.shape))}]")
        assert not re.findall(rf"= \(?{shape}\S* (?:copy|copy-start|transpose)\(.*", compiled.as_text())


PLAIN = AttentionOptions(0.125)
ALL_OPTIONS = AttentionOptions(0.1, sliding_window=1000, soft_cap=30.0)
KERNELS = {
    "decode": (64, 64, 8, 2, 128, 16, "bfloat16", PLAIN, 512),
    "prefill": (2048, 256, 32, 8, 128, 16, "bfloat16", PLAIN, 512),
    "all options, shared lanes, float32": (32, 16, 4, 2, 64, 32, "float32", ALL_OPTIONS, 64),
    "one head": (1, 1, 1, 1, 80, 16, "bfloat16", PLAIN, 8),
    "many key heads": (64, 32, 32, 32, 96, 32, "bfloat16", PLAIN, 64),
    "groups of 16": (512, 64, 16, 1, 64, 64, "bfloat16", ALL_OPTIONS, 64),
    "groups of 3, large heads": (256, 64, 12, 4, 256, 16, "bfloat16", PLAIN, 64),
    "large blocks": (64, 64, 8, 8, 256, 256, "float32", ALL_OPTIONS, 32),
    "float8 cache": (64, 64, 8, 2, 128, 128, "bfloat16", PLAIN, 64, "float8_e4m3fn"),
    "int8 cache": (64, 64, 8, 2, 128, 128, "bfloat16", PLAIN, 64, "int8"),
    "int8 cache, shared lanes": (64, 64, 8, 8, 64, 128, "bfloat16", PLAIN, 64, "int8"),
    "float16 queries": (64, 64, 8, 2, 128, 16, "float16", PLAIN, 64, "bfloat16"),
    "128k tokens of context for 64 rows": (64, 64, 8, 2, 128, 16, "bfloat16", PLAIN, 8192),
}


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels(generation, name):
    compile_kernels(generation, *KERNELS[name])


@pytest.mark.xfail(
    strict=True, reason="XLA:TPU gives the scatter of new scales another layout, and copies them there"
)
def test_the_scales_of_an_int8_cache_are_not_copied():
    compile_kernels("v6e", *KERNELS["int8 cache"], check_scales=True)


def lower_step(mesh: Mesh, generation: str, bucket: Bucket, num_layers: int, greedy_only: bool):
    """A whole step of an 8B Llama with so many layers, tensor-parallel over the mesh: what the runner compiles."""
    backend = TpuAttentionBackend(generation)
    config = {**LLAMA_8B, "num_hidden_layers": num_layers}
    model = build(config, backend, jnp.bfloat16, mesh.shape["model"])
    programs = step_programs(
        model, backend, [bucket], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS,
        max_blocks_per_row=MAX_MODEL_LEN // BLOCK_SIZE, placement=Placement(mesh),
    )  # fmt: skip
    features = Feature.NONE if greedy_only else ALL_FEATURES
    lowered = programs.lower_step(StepVariant(bucket, features, bucket is DECODE))
    return lowered, programs.shapes.kv_cache_shapes[0]


def compile_step(generation: str, bucket: Bucket, num_layers: int, greedy_only: bool = True) -> None:
    mesh = make_mesh(4, devices(generation))
    lowered, local_shape = lower_step(mesh, generation, bucket, num_layers, greedy_only)
    name = f"{generation} 8B Llama, {num_layers} layers, 4 devices, T={bucket.num_tokens}"
    compiled = compile_and_report(name, lowered)
    assert_cache_not_copied(compiled, local_shape, num_layers, "bfloat16")


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("bucket", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_whole_step(generation, bucket):
    """All layers of the oldest and the newest generation, some of those between, since layers are alike; the argmax
    alone, since the whole sampler takes longer to compile than they do."""
    ends = next(iter(TOPOLOGIES)), list(TOPOLOGIES)[-1]
    compile_step(generation, bucket, LLAMA_8B["num_hidden_layers"] if generation in ends else 6)


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_step_with_the_whole_sampler(generation):
    compile_step(generation, DECODE, 1, greedy_only=False)


GROUPED = {
    "decode": (512, 1536, 2048, 128, "bfloat16"),
    "prefill, down": (8192, 2048, 768, 128, "bfloat16"),
    "large matrices": (256, 28672, 4096, 8, "bfloat16"),
    "part lanes": (512, 2048, 192, 128, "bfloat16"),
}
SOME = [("prefill, down", "v6e"), ("large matrices", "tpu7x"), ("part lanes", "v5p")]


@pytest.mark.parametrize("name,generation", [*(("decode", each) for each in TOPOLOGIES), *SOME])
def test_grouped_matmul(name, generation):
    """One device's experts, and their matrices are not copied."""
    rows, outputs, inner, groups, dtype = GROUPED[name]
    whole = NamedSharding(make_mesh(1, devices(generation)), PartitionSpec())
    abstract = partial(jax.ShapeDtypeStruct, sharding=whole)
    multiply = TpuGroupedMatmul(generation)
    assert multiply.why_not(outputs, inner, dtype) is None
    operands = abstract((rows, inner), dtype), abstract((groups, outputs, inner), dtype)
    lowered = jax.jit(multiply).lower(*operands, abstract((groups,), jnp.int32))
    compiled = compile_and_report(f"{generation} grouped matmul, {name}", lowered)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert compiled.memory_analysis().temp_size_in_bytes < groups * outputs * inner // 8


def test_step_with_experts():
    """A layer of Qwen3-30B-A3B over four devices that split every expert: both products are the kernel."""
    folder = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-30b-a3b"
    config = {**json.loads((folder / "config.json").read_text()), "num_hidden_layers": 1}
    mesh, backend = make_mesh(4, devices("v6e")), TpuAttentionBackend("v6e")
    model = build(config, backend, jnp.bfloat16, 4, grouped_matmul=TpuGroupedMatmul("v6e"))
    programs = step_programs(
        model, backend, [DECODE], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS,
        max_blocks_per_row=MAX_MODEL_LEN // BLOCK_SIZE, placement=Placement(mesh),
    )  # fmt: skip
    lowered = programs.lower_step(StepVariant(DECODE, Feature.NONE, True))
    compiled = compile_and_report("v6e Qwen3-30B-A3B, 1 layer, 4 devices", lowered)
    kernels = re.findall(r'custom_call_target="tpu_custom_call"[^\n]*grouped_matmul', compiled.as_text())
    assert len(kernels) == 2
    assert compiled.memory_analysis().temp_size_in_bytes < 16 << 20, "matrices are copied"

"""Families with experts: every layout of their checkpoints, logits on meshes, published sizes, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend, sequence_logits
from tiny_checkpoints import random_tensors, tiny_config, write_safetensors, write_tiny_checkpoint
from transformers_logits import TOKEN_IDS

from jaxserve.errors import CheckpointError, ConfigError, UnsupportedModelError
from jaxserve.models import build
from jaxserve.weights import mxfp4
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import resolve_model
from sharding import make_mesh

pytestmark = pytest.mark.device
PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "models"


def loaded(folder: Path, **options: Any) -> dict[str, np.ndarray]:
    files = resolve_model(str(folder))
    model = build(files.config, OracleBackend(), jnp.float32, **options)
    return {k: np.asarray(v) for k, v in load_params(model.specs, model.weight_map, files).items()}


def fused(tensors: dict[str, np.ndarray], parts: tuple[str, str, str], block: str) -> dict[str, np.ndarray]:
    """As transformers holds them in memory: one tensor of all experts' gate and up, one of their down."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.split(f".{block}.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        experts = sum(name.startswith(f"{layer}.{block}.experts.") for name in tensors) // 3
        gate, up, down = (
            np.stack([tensors[f"{layer}.{block}.experts.{e}.{part}.weight"] for e in range(experts)])
            for part in parts
        )
        kept[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        kept[f"{layer}.mlp.experts.down_proj"] = down
    return {name.replace(f".{block}.gate.", ".mlp.gate."): tensor for name, tensor in kept.items()}


@pytest.mark.parametrize(
    "family, parts, block",
    [
        ("mixtral", ("w1", "w3", "w2"), "block_sparse_moe"),
        ("qwen2_moe", ("gate_proj", "up_proj", "down_proj"), "mlp"),
    ],
)
def test_fused_tensors_load_as_single_ones_do(
    tmp_path: Path, family: str, parts: tuple[str, str, str], block: str
) -> None:
    single = write_tiny_checkpoint(tmp_path / "single", family, tokenizer=False)
    other = shutil.copytree(single, tmp_path / "fused")
    tensors = fused(random_tensors(tiny_config(family)), parts, block)
    assert not any(".experts.0." in name for name in tensors)
    write_safetensors(other / "model.safetensors", tensors)
    expected, found = loaded(single), loaded(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)
    tensors = random_tensors(tiny_config("qwen3_moe"))
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts\.5\.up_proj"):
        loaded(folder)


def as_mxfp4(folder: Path, target: Path) -> dict[str, np.ndarray]:
    """The checkpoint with random MXFP4 experts, and these as they are without quantization."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (target / "config.json").write_text(json.dumps(config))
    tensors, plain, random = random_tensors(config), {}, np.random.RandomState(5)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = random.randint(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        scales = random.randint(122, 126, blocks.shape[:3]).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = mxfp4.dequantize(blocks, scales).swapaxes(1, 2).astype(np.float32)
    write_mixed(target / "model.safetensors", tensors)
    return random_tensors(config) | plain


def write_mixed(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        kind = "U8" if tensor.dtype == np.uint8 else "F32"
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.tobytes()
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


def test_gpt_oss_in_mxfp4_is_what_it_stands_for(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "plain", "gpt_oss", tokenizer=False)
    tensors = as_mxfp4(folder, tmp_path / "packed")
    write_safetensors(folder / "model.safetensors", tensors)
    expected, found = loaded(folder), loaded(tmp_path / "packed")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    "family, data, model",
    [
        ("gpt_oss", 1, 4),
        pytest.param("qwen2_moe", 1, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)")
@pytest.mark.parametrize("expert_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_logits_do_not_depend_on_the_mesh(
    tmp_path: Path, family: str, data: int, model: int, expert_parallel: bool
) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, tokenizer=False)
    files = resolve_model(str(folder))

    def logits(devices: int) -> np.ndarray:
        experts = expert_parallel and devices > 1
        built = build(files.config, OracleBackend(), jnp.float32, devices, expert_parallel=experts)
        mesh = make_mesh(devices)
        params = load_params(built.specs, built.weight_map, files, mesh=mesh, rules=built.context.rules)
        if devices > 1:
            gate_up = params["layers.2.mlp.experts.gate_up"]
            assert gate_up.addressable_shards[0].data.size * devices == gate_up.size
        return sequence_logits(built, params, TOKEN_IDS, (len(TOKEN_IDS),), jnp.float32, mesh)

    np.testing.assert_allclose(logits(model), logits(1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name, billions, active, kv_bytes",
    [
        ("qwen3-30b-a3b", 30.53, 3.35, 48 * 2 * 4 * 128 * 2),
        ("qwen3-235b-a22b", 235.09, 22.19, 94 * 2 * 4 * 128 * 2),
        ("mixtral-8x7b", 46.70, 12.88, 32 * 2 * 8 * 128 * 2),
        ("gpt-oss-20b", 20.91, 4.19, 24 * 2 * 8 * 64 * 2),
    ],
)
def test_published_sizes(name: str, billions: float, active: float, kv_bytes: int) -> None:
    """Parameters in all and those of a token (embedding included), in billions; cached bytes a token."""
    model = build(json.loads((PUBLISHED / name / "config.json").read_text()), OracleBackend())
    sizes = {name: np.prod(spec.shape) for name, spec in model.specs.items()}
    assert round(sum(sizes.values()) / 1e9, 2) == pytest.approx(billions, abs=0.01)
    router = model._module.config.experts[0].router
    idle = sum(size for name, size in sizes.items() if ".experts." in name) * (
        1 - router.top_k / router.num_experts
    )
    assert (sum(sizes.values()) - idle) / 1e9 == pytest.approx(active, abs=0.02)
    specs = model.kv_cache_specs()
    assert sum(2 * s.num_kv_heads * s.head_size * s.dtype_bytes for s in specs) == kv_bytes
    assert {source.target for source in model.weight_map} == set(model.specs)


def test_windows_without_layer_types() -> None:
    config = tiny_config("gpt_oss")
    del config["layer_types"]
    windows = [s.sliding_window for s in build(config, OracleBackend(), jnp.float32).kv_cache_specs()]
    assert windows == [8, None, 8]
    config = tiny_config("qwen2_moe", use_sliding_window=True, sliding_window=6, max_window_layers=2)
    windows = [s.sliding_window for s in build(config, OracleBackend(), jnp.float32).kv_cache_specs()]
    assert windows == [6, None, None]


@pytest.mark.parametrize(
    "family, overrides, options, error, message",
    [
        ("mixtral", {"num_local_experts": None}, {}, UnsupportedModelError, "has no 'num_local_experts'"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, {}, UnsupportedModelError, "is 9, but there are 8 experts"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, {}, UnsupportedModelError, "positive integer, got 0"),
        ("mixtral", {"quantization_config": {"quant_method": "mxfp4"}}, {}, UnsupportedModelError, "'mxfp4'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, {}, UnsupportedModelError, "'fp8'"),
        ("qwen2_moe", {}, {"tensor_parallel_size": 4, "expert_parallel": True}, ConfigError,
         "6 experts cannot be spread evenly over 4 devices"),
        ("llama", {}, {"expert_parallel": True}, ConfigError, "LlamaForCausalLM has no experts"),
        ("qwen3_moe", {"moe_intermediate_size": 30}, {"tensor_parallel_size": 4}, ConfigError,
         "does not divide the experts' feed-forward size 30"),
    ],
)  # fmt: skip
def test_refusals(
    family: str, overrides: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(tiny_config(family, **overrides), OracleBackend(), jnp.float32, **options)

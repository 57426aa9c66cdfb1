"""DeepSeek-V2 and V3: checkpoint layouts, meshes, the engine, published sizes, routing rules, refusals."""

from __future__ import annotations

import json
import logging
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

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ConfigError, UnsupportedModelError
from jaxserve.layers.router import RouterConfig
from jaxserve.models import Model, build
from jaxserve.models.deepseek_v2 import router_config
from jaxserve.outputs import RequestOutput
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import resolve_model
from sharding import make_mesh

pytestmark = pytest.mark.device
PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "models"


def loaded(folder: Path, **options: Any) -> tuple[Model, dict[str, jax.Array]]:
    files = resolve_model(str(folder))
    model = build(files.config, OracleBackend(), jnp.float32, **options)
    devices = options.get("tensor_parallel_size", 1)
    mesh = make_mesh(devices) if devices > 1 else None
    return model, load_params(model.specs, model.weight_map, files, mesh=mesh, rules=model.context.rules)


def test_fused_experts_and_further_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint as transformers holds it in memory, with a layer past the last, loads as the classic one does."""
    classic = write_tiny_checkpoint(tmp_path / "classic", "deepseek_v3", tokenizer=False)
    other = shutil.copytree(classic, tmp_path / "fused")
    tensors = random_tensors(tiny_config("deepseek_v3"))
    for layer in (1, 2):
        block = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{block}.{e}.{part}_proj.weight") for e in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{block}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{block}.down_proj": down}
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    write_safetensors(other / "model.safetensors", tensors)
    with caplog.at_level(logging.INFO):
        found = loaded(other)[1]
    assert "Ignored 1 tensor(s) that the model does not use: model.layers.3.eh_proj.weight" in caplog.text
    for name, value in loaded(classic)[1].items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize(
    "devices, options, num_tokens",
    [
        (4, {"expert_parallel": True}, 48),
        pytest.param(2, {"sequence_parallel": True}, 128, marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)")
def test_logits_do_not_depend_on_the_mesh(
    tmp_path: Path, devices: int, options: dict[str, Any], num_tokens: int
) -> None:
    """Every device has its heads, and the whole latent."""
    folder = write_tiny_checkpoint(tmp_path, "deepseek_v3", tokenizer=False, num_hidden_layers=2)
    text, mesh = (TOKEN_IDS * 3)[:num_tokens], make_mesh(devices)
    model, params = loaded(folder, tensor_parallel_size=devices, **options)
    spec, _ = model.kv_cache_specs()
    assert spec.on_one_of(devices) == spec
    found = sequence_logits(model, params, text, (num_tokens,), jnp.float32, mesh)
    alone = sequence_logits(*loaded(folder), text, (num_tokens,), jnp.float32)
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-4)


def test_the_engine_serves_what_the_model_computes(tmp_path: Path) -> None:
    """Prompts in chunks beside decoding rows, then from a warm prefix cache: the likeliest tokens of the whole text."""
    folder = write_tiny_checkpoint(tmp_path, "deepseek_v2_groups", tokenizer=False, num_hidden_layers=1)
    llm = LLM(
        str(folder), skip_tokenizer_init=True, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64,
        block_size=16, kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    prompts = [list(TOKEN_IDS[:41]), [*TOKEN_IDS[:37], 7, 8], [9, 4]]
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)

    def answers() -> list[RequestOutput]:
        return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    first, again = answers(), answers()
    assert again[0].num_cached_tokens == again[1].num_cached_tokens == 32
    tokens = [list(output.outputs[0].token_ids) for output in first]
    assert [list(output.outputs[0].token_ids) for output in again] == tokens
    text = prompts[0] + tokens[0]
    logits = sequence_logits(*loaded(folder), text, (48,), jnp.float32)[40:47]
    assert logits[np.arange(7), tokens[0]] == pytest.approx(logits.max(-1), abs=1e-4)


def test_published_sizes() -> None:
    """Parameters in all and those of a token, in billions; cached bytes a token; the softmax scale."""
    model = build(json.loads((PUBLISHED / "deepseek-v3" / "config.json").read_text()), OracleBackend())
    sizes = {name: np.prod(spec.shape) for name, spec in model.specs.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert sum(sizes.values()) / 1e9 == pytest.approx(671.03, abs=0.01)
    assert (sum(sizes.values()) - experts * (1 - 8 / 256)) / 1e9 == pytest.approx(37.55, abs=0.01)
    specs = model.kv_cache_specs()
    assert sum(spec.bytes_per_block(16) for spec in specs) == 16 * 576 * 2 * 61
    assert {(spec.num_kv_heads, spec.value_size) for spec in specs} == {(1, 512)}
    (options,) = model.attention_options
    assert options.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert {source.target for source in model.weight_map} == set(model.specs)


def test_routing_rules() -> None:
    config = tiny_config("deepseek_v3")
    v3 = RouterConfig(8, 3, "sigmoid", True, 2.5, 4, 2, "best_two", correction_bias=True)
    assert router_config(config, "greedy", "softmax") == v3
    bare = {key: config[key] for key in ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")}
    assert router_config(bare, "greedy", "softmax") == RouterConfig(8, 3, group_score="best")
    groups = RouterConfig(8, 3, num_groups=4, top_groups=2, group_score="best")
    assert router_config(bare, "group_limited_greedy", "softmax") == groups
    assert router_config({"n_routed_experts": None}, "greedy", "softmax") is None


def test_layers_with_experts() -> None:
    config = tiny_config("deepseek_v2", num_hidden_layers=6, first_k_dense_replace=2, moe_layer_freq=2)
    model = build(config, OracleBackend(), jnp.float32)
    assert {int(name.split(".")[1]) for name in model.specs if ".experts." in name} == {2, 4}


@pytest.mark.parametrize(
    "overrides, options, error, message",
    [
        ({"topk_method": "best"}, {}, UnsupportedModelError, "'best' is not supported; supported are greedy"),
        ({"scoring_func": "tanh"}, {}, UnsupportedModelError, "scoring_func 'tanh' is not supported"),
        ({"n_group": 3}, {}, UnsupportedModelError, "8 experts are not 3 groups"),
        ({"mlp_bias": True}, {}, UnsupportedModelError, "mlp_bias is not supported"),
        ({"kv_lora_rank": None}, {}, UnsupportedModelError, "has no 'kv_lora_rank'"),
        ({"qk_rope_head_dim": 7}, {}, UnsupportedModelError, "head size of 7 cannot be rotated"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, {}, UnsupportedModelError,
         r"\(quant_method 'fp8'\) are not supported"),
        ({}, {"tensor_parallel_size": 8}, ConfigError, "tensor_parallel_size 8 does not divide the 4 query heads"),
    ],
)  # fmt: skip
def test_refusals(
    overrides: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(tiny_config("deepseek_v3", **overrides), OracleBackend(), jnp.float32, **options)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_caches_of_one_byte_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, "deepseek_v2", tokenizer=False)
    with pytest.raises(ConfigError, match=r"is not supported for latent attention \(MLA\)") as caught:
        LLM(str(folder), skip_tokenizer_init=True, kv_cache_dtype=name, max_model_len=64)
    assert caught.value.param == "kv_cache_dtype"

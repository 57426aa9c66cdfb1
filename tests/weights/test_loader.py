"""Loading into parameters: placements, types, progress, and what is said of a wrong checkpoint."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend, sequence_logits
from tiny_checkpoints import random_tensors, tiny_config, write_safetensors, write_tiny_checkpoint
from tiny_gguf import write_tiny_gguf
from transformers_logits import TOKEN_IDS

from jaxserve.errors import CheckpointError
from jaxserve.models import Model, build
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import resolve_model
from sharding import make_mesh

pytestmark = pytest.mark.device


def load(path: Path, dtype: object = jnp.float32) -> tuple[Model, dict[str, jax.Array]]:
    files = resolve_model(str(path))
    model = build(files.config, OracleBackend(), dtype)
    return model, load_params(model.specs, model.weight_map, files)


def write_with(folder: Path, change: dict[str, np.ndarray | None], family: str = "llama") -> Path:
    """A checkpoint with some tensors replaced, or (None) left out."""
    write_tiny_checkpoint(folder, family, tokenizer=False)
    tensors = random_tensors(tiny_config(family)) | {k: v for k, v in change.items() if v is not None}
    kept = {name: tensor for name, tensor in tensors.items() if change.get(name, tensor) is not None}
    write_safetensors(folder / "model.safetensors", kept)
    return folder


def test_fused_weights_hold_each_tensor_where_the_layers_expect_it(tmp_path: Path) -> None:
    model, params = load(write_tiny_checkpoint(tmp_path, "llama_mqa_biased", tokenizer=False))
    tensors = random_tensors(tiny_config("llama_mqa_biased"))
    assert list(params) == list(model.specs)
    attention = "model.layers.2.self_attn"
    # One KV head: q, k and v in a row.
    qkv = np.concatenate([tensors[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    np.testing.assert_array_equal(params["layers.2.attention.qkv"], qkv)
    bias = np.concatenate([tensors[f"{attention}.{part}_proj.bias"] for part in "qkv"])
    np.testing.assert_array_equal(params["layers.2.attention.qkv_bias"], bias)
    np.testing.assert_array_equal(params["layers.2.attention.out"], tensors[f"{attention}.o_proj.weight"])
    gate_up = np.stack([tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    np.testing.assert_array_equal(params["layers.0.mlp.gate_up"], gate_up)
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"])
    norm = tensors["model.layers.1.post_attention_layernorm.weight"]
    np.testing.assert_array_equal(params["mlp_norm"][1], norm)


def test_few_leaves(tmp_path: Path) -> None:
    """Dispatch pays for each array: four a layer (five with q/k norm), and the rest once."""
    model, _ = load(write_tiny_checkpoint(tmp_path / "llama", "llama", tokenizer=False))
    assert len(model.specs) == 4 * 3 + 5
    model, _ = load(write_tiny_checkpoint(tmp_path / "qwen3", "qwen3", tokenizer=False))
    assert len(model.specs) == 5 * 3 + 4


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("computed", [jnp.float32, jnp.bfloat16])
def test_types(tmp_path: Path, stored: str, computed: object) -> None:
    _, params = load(write_tiny_checkpoint(tmp_path, dtype=stored, tokenizer=False), computed)
    expected = random_tensors(tiny_config("llama"))["model.embed_tokens.weight"]
    assert {value.dtype for value in params.values()} == {jnp.dtype(computed)}
    found = np.asarray(params["embedding"].astype(jnp.float32))
    rtol = 1e-6 if (stored, computed) == ("float32", jnp.float32) else 1e-2
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("family", ["llama3", "llama_mqa_biased", "mistral", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_folder_s_logits(tmp_path: Path, family: str) -> None:
    """Names, row order, biases, norms and Llama 3's frequency factors survive the detour."""
    write_tiny_gguf(tmp_path / "a.gguf", family)
    folder = write_tiny_checkpoint(tmp_path / "folder", family, tokenizer=False)
    expected = sequence_logits(*load(folder), TOKEN_IDS, (24, 24), jnp.float32)
    found = sequence_logits(*load(tmp_path / "a.gguf"), TOKEN_IDS, (24, 24), jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_several_files(tmp_path: Path) -> None:
    _, one = load(write_tiny_checkpoint(tmp_path / "one", tokenizer=False))
    _, several = load(write_tiny_checkpoint(tmp_path / "several", num_files=4, tokenizer=False))
    for name in one:
        np.testing.assert_array_equal(one[name], several[name])


def test_each_device_gets_its_shard(tmp_path: Path) -> None:
    files = resolve_model(str(write_tiny_checkpoint(tmp_path, "qwen2", tokenizer=False)))
    mesh = make_mesh(2)
    model = build(files.config, OracleBackend(), jnp.float32, 2)
    params = load_params(model.specs, model.weight_map, files, mesh=mesh)
    for name, abstract in model.abstract_params(mesh).items():
        assert params[name].sharding == abstract.sharding
    embedding = random_tensors(tiny_config("qwen2"))["model.embed_tokens.weight"]
    for half, shard in zip(
        (embedding[:160], embedding[160:]), params["embedding"].addressable_shards, strict=True
    ):
        np.testing.assert_array_equal(shard.data, half)


def test_progress(tmp_path: Path) -> None:
    files = resolve_model(str(write_tiny_checkpoint(tmp_path, tokenizer=False)))
    model = build(files.config, OracleBackend(), jnp.float32)
    calls: list[tuple[int, int]] = []
    load_params(
        model.specs, model.weight_map, files, progress=lambda done, total: calls.append((done, total))
    )
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (model.param_bytes(), model.param_bytes())
    assert len(calls) == len(model.specs)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_with(tmp_path, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks the tensor model.layers.1.mlp.up_proj.weight"):
        load(folder)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    norms = [f"model.layers.{i}.{n}_layernorm.weight" for i in range(3) for n in ("input", "post_attention")]
    folder = write_with(tmp_path, dict.fromkeys(norms))
    with pytest.raises(CheckpointError, match=r"and 3 more"):
        load(folder)


def test_an_unexpected_shape_is_named_with_both(tmp_path: Path) -> None:
    folder = write_with(tmp_path, {"model.norm.weight": np.ones(63, np.float32)})
    with pytest.raises(
        CheckpointError, match=r"model.norm.weight has shape \(63,\); the config implies \(64,\)"
    ):
        load(folder)


def test_a_truncated_file(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, tokenizer=False) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"is truncated"):
        load(tmp_path)


def test_unused_tensors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """rotary frequencies, and the lm_head of a model that ties it."""
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "lm_head.weight": np.ones((320, 64), np.float32),
    }
    with caplog.at_level(logging.INFO):
        _, params = load(write_with(tmp_path, extra, "qwen2"))
    assert "Ignored 2 tensor(s)" in caplog.text
    assert "lm_head.weight" in caplog.text
    assert "lm_head" not in params

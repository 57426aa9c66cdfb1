"""Tensor parallelism changes no logits, and costs the expected collectives and nothing more."""

import collections
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend, abstract_step, sequence_logits
from tiny_checkpoints import write_tiny_checkpoint
from transformers_logits import TOKEN_IDS

from jaxserve.errors import ConfigError
from jaxserve.models import Model, build
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import ModelFiles, resolve_model
from sharding import make_mesh

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)"),
]


def load(folder: Path, size: int, sequence_parallel: bool = False) -> tuple[Model, dict[str, jax.Array]]:
    files: ModelFiles = resolve_model(str(folder))
    mesh = make_mesh(size)
    model = build(files.config, OracleBackend(), jnp.float32, size, sequence_parallel=sequence_parallel)
    return model, load_params(model.specs, model.weight_map, files, mesh=mesh)


@pytest.mark.parametrize(
    "family, size, overrides",
    [
        ("llama", 2, {"vocab_size": 319}),  # a vocabulary that does not divide
        ("qwen3", 4, {"vocab_size": 318, "num_attention_heads": 8}),  # each KV head held twice, tied
        ("llama_mqa_biased", 4, {}),  # one KV head held four times, every bias
        ("qwen2", 2, {}),
    ],
)
def test_logits_do_not_depend_on_the_size(tmp_path: Path, family: str, size: int, overrides: dict) -> None:
    folder = write_tiny_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    token_ids = [token % 318 for token in TOKEN_IDS]
    expected = sequence_logits(*load(folder, 1), token_ids, (24, 24), jnp.float32)
    model, params = load(folder, size)
    found = sequence_logits(model, params, token_ids, (24, 24), jnp.float32, make_mesh(size))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    qkv = params["layers.0.attention.qkv"]
    assert qkv.addressable_shards[0].data.size * size == qkv.size
    assert model.kv_cache_specs()[0].num_kv_heads % size == 0


def test_two_all_reduces_a_layer(tmp_path: Path) -> None:
    """One for the embedding, two a layer; nothing gathers weights or activations."""
    folder = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False, num_key_value_heads=4)
    model, _ = load(folder, 4)
    step, args = abstract_step(model, make_mesh(4), num_tokens=16)
    collectives = collectives_of(step.lower(*args))
    assert collectives == ["all-reduce"] * (1 + 2 * 3)


def collectives_of(lowered: jax.stages.Lowered) -> list[str]:
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf"= \S+ ({kinds})\(", lowered.compile().as_text())


def test_shared_tokens_change_no_logits(tmp_path: Path) -> None:
    """Sequence parallelism: sums become halves that meet again, and the logits stay."""
    folder = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    token_ids = [(7 * i) % 300 for i in range(256)]
    expected = sequence_logits(*load(folder, 1), token_ids, (256,), jnp.float32)
    model, params = load(folder, 2, sequence_parallel=True)
    found = sequence_logits(model, params, token_ids, (256,), jnp.float32, make_mesh(2))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    step, args = abstract_step(model, make_mesh(2), num_tokens=128)
    kinds = collections.Counter(collectives_of(step.lower(*args)))
    assert kinds == {"reduce-scatter": 1 + 2 * 3, "all-gather": 2 * 3 + 1}
    step, args = abstract_step(model, make_mesh(2), num_tokens=64)
    assert set(collectives_of(step.lower(*args))) == {"all-reduce"}


@pytest.mark.parametrize(
    "size, overrides, message",
    [
        (3, {}, "does not split 4 query heads and 2 key/value heads evenly; sizes that do: 1, 2, 4"),
        (4, {"num_key_value_heads": 2, "num_attention_heads": 2}, "does not split 2 query heads"),
        (2, {"intermediate_size": 97}, "does not divide the feed-forward size 97"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, size: int, overrides: dict, message: str) -> None:
    files = resolve_model(str(write_tiny_checkpoint(tmp_path, tokenizer=False, **overrides)))
    with pytest.raises(ConfigError, match=message):
        build(files.config, OracleBackend(), jnp.float32, size)

"""A model over caches of one byte an element: near its float32 logits; a checkpoint's scales are read and used."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend, sequence_logits
from tiny_checkpoints import random_tensors, tiny_config, write_safetensors, write_tiny_checkpoint

from jaxserve.models import build
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import resolve_model

pytestmark = pytest.mark.device

TOKEN_IDS = [11 + 7 * i % 300 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("kv") / "llama", "llama", tokenizer=False)


def with_scales(folder: Path, target: Path, k_scale: float, v_scale: float) -> Path:
    """The same weights with scales of every layer's keys and values, spelt as either format does."""
    shutil.copytree(folder, target)
    tensors = dict(random_tensors(tiny_config("llama")))
    for layer in range(3):
        names = ("k_proj.k_scale", "v_proj.v_scale") if layer == 0 else ("k_scale", "v_scale")
        for name, scale in zip(names, (k_scale, v_scale)):
            value = np.full((1,) if layer == 1 else (), scale, np.float32)
            tensors[f"model.layers.{layer}.self_attn.{name}"] = value
    write_safetensors(target / "model.safetensors", tensors)
    return target


def logits(folder: Path, dtype: str) -> np.ndarray:
    files = resolve_model(str(folder))
    model = build(files.config, OracleBackend(), jnp.float32, kv_cache_dtype=dtype)
    params = load_params(model.specs, model.weight_map, files)
    return sequence_logits(model, params, TOKEN_IDS, (24, 16), dtype)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_logits_stay_close(folder):
    exact = logits(folder, "float32")
    errors = {name: distance(logits(folder, name), exact) for name in ("bfloat16", "int8", "float8_e4m3fn")}
    assert 0 < errors["int8"] < 0.04, errors
    assert 0 < errors["bfloat16"] < errors["float8_e4m3fn"] < 0.2, errors


def test_scales_of_the_checkpoint(folder, tmp_path):
    plain = logits(folder, "float8_e4m3fn")
    # Powers of two change no digit of a float8, as long as it stays in the range.
    shifted = logits(with_scales(folder, tmp_path / "shifted", 0.25, 0.125), "float8_e4m3fn")
    assert distance(shifted, plain) < 0.02
    # Keys too small for the type are gone; what is left of attention is a mean.
    gone = logits(with_scales(folder, tmp_path / "gone", 2.0**14, 1.0), "float8_e4m3fn")
    assert distance(gone, plain) > 0.2
    # Other caches need no scales, and take none.
    assert distance(logits(tmp_path / "gone", "int8"), logits(folder, "int8")) == 0


def test_only_scaled_caches_cost_a_parameter(folder):
    config = resolve_model(str(folder)).config
    scaled = build(config, OracleBackend(), jnp.bfloat16, kv_cache_dtype="float8_e4m3fn")
    spec = scaled.specs["kv_scales"]
    assert (spec.shape, spec.dtype, spec.init_mean) == ((3, 2), np.float32, 1.0)
    for dtype in (None, "int8", "bfloat16"):
        assert "kv_scales" not in build(config, OracleBackend(), jnp.bfloat16, kv_cache_dtype=dtype).specs

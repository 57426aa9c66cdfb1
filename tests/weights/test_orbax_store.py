"""The engine-ready store: what is saved on one device comes back on any mesh, and only what fits the model."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend
from tiny_checkpoints import tiny_config, write_tiny_checkpoint

from jaxserve.errors import CheckpointError
from jaxserve.models import Model, build
from jaxserve.weights import orbax_store
from jaxserve.weights.loader import load_params
from jaxserve.weights.orbax_store import restore_params, save_params
from jaxserve.weights.resolve import ModelFiles, resolve_model
from pallas_kernels.kv_cache_update.quantized import FLOAT8
from sharding import make_mesh

pytestmark = pytest.mark.device


def convert(files: ModelFiles, store: Path, dtype: object = jnp.bfloat16) -> Model:
    model = build(files.config, OracleBackend(), dtype, kv_cache_dtype=FLOAT8)
    params = load_params(model.specs, model.weight_map, files)
    save_params(store, model.specs, model.weight_map, params.items())
    return model


@pytest.mark.parametrize(
    "family, tensor, data",
    [
        ("llama_mqa_biased", 4, 1),
        ("qwen3_moe", 2, 2),
        pytest.param("qwen3", 1, 1, marks=pytest.mark.slow),
        pytest.param("qwen3", 4, 1, marks=pytest.mark.slow),
        pytest.param("mixtral", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_restored_over_a_mesh_as_if_loaded_there(
    tmp_path: Path, family: str, tensor: int, data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four devices replicate the KV heads, and an uneven vocabulary is padded; two ranks hold other experts each."""
    if jax.device_count() < tensor * data:
        pytest.skip("needs virtual devices")
    monkeypatch.setattr(orbax_store, "GROUP_BYTES", 100_000)  # several groups
    files = resolve_model(
        str(write_tiny_checkpoint(tmp_path / "hf", family, tokenizer=False, vocab_size=319))
    )
    convert(files, tmp_path / "store")
    assert len(list((tmp_path / "store" / "params").iterdir())) > 1
    mesh = None if tensor * data == 1 else make_mesh(tensor, data_parallel_size=data)
    model = build(
        files.config, OracleBackend(), jnp.bfloat16, tensor, data_parallel_size=data, expert_parallel=data > 1
    )
    rules = model.context.rules
    restored = restore_params(tmp_path / "store", model.specs, model.weight_map, mesh=mesh, rules=rules)
    expected = load_params(model.specs, model.weight_map, files, mesh=mesh, rules=rules)
    assert list(restored) == list(model.specs)
    for name, value in expected.items():
        assert restored[name].dtype == value.dtype
        assert restored[name].sharding.is_equivalent_to(value.sharding, value.ndim), name
        np.testing.assert_array_equal(restored[name], value)


@pytest.mark.slow
def test_into_another_type(tmp_path: Path) -> None:
    files = resolve_model(str(write_tiny_checkpoint(tmp_path / "hf", tokenizer=False)))
    half = convert(files, tmp_path / "store")
    model = build(files.config, OracleBackend(), jnp.float32)
    restored = restore_params(tmp_path / "store", model.specs, model.weight_map)
    expected = load_params(half.specs, half.weight_map, files)
    for name, value in restored.items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, expected[name].astype(jnp.float32))


def test_refusals(tmp_path: Path) -> None:
    files = resolve_model(str(write_tiny_checkpoint(tmp_path / "hf", "qwen3", tokenizer=False)))
    store = tmp_path / "store"
    model = build(files.config, OracleBackend(), jnp.float32)
    with pytest.raises(CheckpointError, match=r"holds no weights converted by jaxserve"):
        restore_params(store, model.specs, model.weight_map)
    convert(files, store)
    with pytest.raises(CheckpointError, match=r"holds converted weights already"):
        save_params(store, model.specs, model.weight_map, [])
    wider = build(tiny_config("qwen3", intermediate_size=128), OracleBackend(), jnp.float32)
    with pytest.raises(CheckpointError, match=r"has shape \(64, 96\); the config implies \(64, 128\)"):
        restore_params(store, wider.specs, wider.weight_map)
    other = build(tiny_config("llama_mqa_biased"), OracleBackend(), jnp.float32)
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head.weight"):
        restore_params(store, other.specs, other.weight_map)
    layout = store / "jaxserve_layout.json"
    layout.write_text(json.dumps(json.loads(layout.read_text()) | {"version": 1}))
    with pytest.raises(CheckpointError, match=r"layout 1; 2 is readable.*convert the model again"):
        restore_params(store, model.specs, model.weight_map)

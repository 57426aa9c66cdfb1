"""Dummy weights: distribution, reproducibility, independence of the sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend, sequence_logits
from tiny_checkpoints import tiny_config

from jaxserve.models import build
from jaxserve.weights.dummy import dummy_params
from sharding import ParamSpec, make_mesh

pytestmark = pytest.mark.device
SPEC = ParamSpec((512, 4, 256), np.dtype(np.float32), ("embed", "kv_heads", "head_dim"), init_scale=0.02)


def test_distribution() -> None:
    values = np.asarray(dummy_params({"w": SPEC})["w"])
    assert abs(values.mean()) < 1e-4
    assert values.std() == pytest.approx(0.02, rel=0.01)
    flat = values.reshape(512, -1)
    correlation = np.corrcoef(flat)[~np.eye(512, dtype=bool)]
    assert np.abs(correlation).max() < 0.2
    assert len(np.unique(values)) > 0.9 * values.size


def test_seed_and_name_matter_and_nothing_else_does() -> None:
    first = dummy_params({"a": SPEC, "b": SPEC}, seed=1)
    again = dummy_params({"b": SPEC}, seed=1)
    other = dummy_params({"b": SPEC}, seed=2)
    np.testing.assert_array_equal(first["b"], again["b"])
    assert np.asarray(first["a"] != first["b"]).mean() > 0.99
    assert np.asarray(first["b"] != other["b"]).mean() > 0.99


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)")
def test_sharding_changes_no_value() -> None:
    mesh = make_mesh(4)
    split = dummy_params({"w": SPEC}, mesh=mesh)["w"]
    assert split.addressable_shards[0].data.shape == (512, 1, 256)
    np.testing.assert_array_equal(split, dummy_params({"w": SPEC})["w"])


@pytest.mark.parametrize("family", ["llama_mqa_biased", "qwen3"])
def test_a_model_runs_on_them(family: str) -> None:
    model = build(tiny_config(family), OracleBackend(), jnp.bfloat16)
    params = dummy_params(model.specs)
    assert all(
        params[name].dtype == spec.dtype and params[name].shape == spec.shape
        for name, spec in model.specs.items()
    )
    np.testing.assert_array_equal(params["attention_norm"], np.ones((3, 64)))
    logits = sequence_logits(model, params, range(16), (8, 8), jnp.bfloat16)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    assert logits.std() > 0

"""The engine-ready store: what is saved comes back, and only into the layout it was made for."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_harness import OracleBackend
from tiny_checkpoints import tiny_config

from jaxserve.errors import CheckpointError
from jaxserve.models import build
from jaxserve.weights.dummy import dummy_params
from jaxserve.weights.orbax_store import restore_params, save_params
from sharding import make_mesh

pytestmark = pytest.mark.device


@pytest.mark.parametrize("size", [1, 2])
def test_round_trip(tmp_path: Path, size: int) -> None:
    if jax.device_count() < size:
        pytest.skip("needs 2 devices (virtual ones do)")
    mesh = make_mesh(size)
    model = build(tiny_config("qwen3"), OracleBackend(), jnp.bfloat16, size, mesh=mesh)
    params = dummy_params(model.specs, mesh=mesh)
    save_params(tmp_path / "store", model.specs, params, tensor_parallel_size=size)
    restored = restore_params(tmp_path / "store", model.specs, tensor_parallel_size=size, mesh=mesh)
    assert list(restored) == list(model.specs)
    for name, value in params.items():
        assert restored[name].dtype == value.dtype
        assert restored[name].sharding == value.sharding
        np.testing.assert_array_equal(restored[name], value)


def test_refusals(tmp_path: Path) -> None:
    model = build(tiny_config("qwen3"), OracleBackend(), jnp.float32)
    store = tmp_path / "store"
    with pytest.raises(CheckpointError, match=r"holds no parameters saved by jaxserve"):
        restore_params(store, model.specs, tensor_parallel_size=1)
    save_params(store, model.specs, dummy_params(model.specs), tensor_parallel_size=1)
    with pytest.raises(CheckpointError, match=r"exists already"):
        save_params(store, model.specs, {}, tensor_parallel_size=1)
    half = build(tiny_config("qwen3"), OracleBackend(), jnp.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"attention_norm is \['float32', \[3, 64\]\] there and \['bfloat16'"
    ):
        restore_params(store, half.specs, tensor_parallel_size=1)
    with pytest.raises(CheckpointError, match=r"saved for tensor_parallel_size 1, not 2"):
        restore_params(store, model.specs, tensor_parallel_size=2)

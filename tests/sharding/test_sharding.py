"""Logical axes, rules, meshes and ParamSpec."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sharding import DEFAULT_RULES, ParamSpec, ShardingRules, make_mesh, named_sharding

pytestmark = pytest.mark.device
F32 = np.dtype(np.float32)


def test_default_rules_are_tensor_parallelism() -> None:
    assert DEFAULT_RULES.partition_spec(("embed", "kv_heads")) == PartitionSpec(None, "model")
    assert DEFAULT_RULES.partition_spec(("ffn", "embed")) == PartitionSpec("model", None)
    assert DEFAULT_RULES.partition_spec(("vocab", "embed")) == PartitionSpec("model", None)
    assert DEFAULT_RULES.partition_spec(("layers", None)) == PartitionSpec(None, None)


def test_rules_are_a_policy_that_can_be_replaced() -> None:
    rules = dataclasses.replace(ShardingRules(), embed="data", vocab=None)
    assert rules.partition_spec(("vocab", "embed")) == PartitionSpec(None, "data")


def test_unknown_axes_and_double_use_are_refused() -> None:
    with pytest.raises(KeyError, match=r"'head' is no logical axis; known are embed, expert"):
        DEFAULT_RULES.partition_spec(("head",))
    with pytest.raises(ValueError, match=r"one is used twice"):
        DEFAULT_RULES.partition_spec(("vocab", "ffn"))


def test_mesh() -> None:
    mesh = make_mesh(1)
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    with pytest.raises(ValueError, match=r"tensor_parallel_size 1000 is 1000, but \d+ device"):
        make_mesh(1000)
    with pytest.raises(ValueError, match=r"tensor_parallel_size 0 is 0"):
        make_mesh(0)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (virtual ones do)")
def test_mesh_takes_the_devices_it_is_given() -> None:
    devices = jax.devices()[2:4]
    assert make_mesh(2, devices).devices.ravel().tolist() == devices
    mesh = make_mesh(2, data_parallel_size=2)
    assert dict(mesh.shape) == {"data": 2, "model": 2}
    assert mesh.devices.ravel().tolist() == jax.devices()[:4]


def test_experts_lie_on_all_devices() -> None:
    axes = ("expert", "expert_ffn", "embed")
    assert DEFAULT_RULES.partition_spec(axes) == PartitionSpec(None, "model", None)
    assert DEFAULT_RULES.for_experts().partition_spec(axes) == PartitionSpec(("data", "model"), None, None)


def test_param_spec() -> None:
    spec = ParamSpec((6, 4), F32, ("vocab", "embed"))
    assert spec.size_bytes == 24 * spec.dtype.itemsize
    mesh = make_mesh(1)
    abstract = spec.abstract(mesh)
    assert (abstract.shape, abstract.dtype) == ((6, 4), spec.dtype)
    assert abstract.sharding == named_sharding(mesh, ("vocab", "embed"))
    assert spec.abstract().sharding is None
    with pytest.raises(ValueError, match=r"do not name the 2 dimensions"):
        ParamSpec((6, 4), F32, ("vocab",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.shape = (1,)

"""Sums over devices: the oracle's order, that the Hopper kernel lowers once for all sizes, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.all_reduce.dispatch import all_reduce_of, hopper_all_reduce
from pallas_kernels.all_reduce.layout import COUNTER_BYTES, NAN, NOTHING, workspace_bytes
from pallas_kernels.all_reduce.peers import current_peers, reaching
from pallas_kernels.all_reduce.reference import ordered_sum

pytestmark = pytest.mark.device
hopper = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need jax >= 0.11")
MIB = 1 << 20


def test_the_oracle_adds_in_the_devices_order_for_any_number_of_rows():
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    spec = PartitionSpec("model")
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((4, 9, 64), np.float32) * 10.0 ** rng.integers(-3, 4, (4, 9, 64))
    parts = parts.astype(jnp.bfloat16)
    wide = parts.astype(np.float32)
    expected = (((wide[0] + wide[1]) + wide[2]) + wide[3]).astype(jnp.bfloat16)
    add = jax.jit(
        jax.shard_map(
            lambda x: ordered_sum(x, "model"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
    for rows in (1, 4, 9):
        found = np.asarray(add(parts[:, :rows].reshape(-1, 64))).reshape(4, rows, 64)
        for device in range(4):
            np.testing.assert_array_equal(found[device].view(np.uint16), expected[:rows].view(np.uint16))


@hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_kernel_serves_all_sizes_and_knows_no_multicast(dtype: str) -> None:
    from pallas_kernels.all_reduce.gpu import GpuAllReduce

    add = GpuAllReduce(4, MIB, ((8192, 16), (MIB, 128)))
    peers = jax.ShapeDtypeStruct((9,), jnp.int32)

    def lowered(rows: int) -> str:
        x = jax.ShapeDtypeStruct((rows, 1024), dtype)
        return jax.jit(add).trace(x, peers).lower(lowering_platforms=("cuda",)).as_text()

    texts = {rows: lowered(rows) for rows in (1, 2, 64, 256)}
    hashes = {rows: re.findall(r'kernel_hash = "([^"]*)"', text) for rows, text in texts.items()}
    assert all(len(each) == 1 for each in hashes.values())
    assert hashes[1] == hashes[2] != hashes[64] == hashes[256]
    for text in texts.values():
        assert "uses_xla_collective_metadata = false" in text
        assert "xla_replica_ids" not in text
        assert not re.search("multimem|multicast|nvshmem", text)


@hopper
def test_one_kernel_norms_all_numbers_of_rows() -> None:
    from pallas_kernels.all_reduce.gpu import GpuAllReduce

    add = GpuAllReduce(2, MIB, ((MIB, 64),), norm_bytes=1 << 19)
    assert "multiples of 1024" in (add.why_not_norm((4, 2880), jnp.bfloat16) or "")
    assert "16-bit" in (add.why_not_norm((4, 1024), jnp.float32) or "")
    assert add.why_not_norm((32, 8192), jnp.bfloat16) is None
    assert "norms up to 524288" in (add.why_not_norm((33, 8192), jnp.bfloat16) or "")

    def lowered(rows: int) -> str:
        x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
        peers, weight = jax.ShapeDtypeStruct((5,), jnp.int32), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
        norm = jax.jit(lambda x, peers, weight: add.with_norm(x, peers, x, weight, 1e-5))
        return norm.trace(x, peers, weight).lower(lowering_platforms=("cuda",)).as_text()

    hashes = [re.findall(r'kernel_hash = "([^"]*)"', lowered(rows)) for rows in (1, 256)]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 1


@hopper
def test_refuses_what_it_cannot_add() -> None:
    from pallas_kernels.all_reduce.gpu import GpuAllReduce

    add = GpuAllReduce(2, 4096, ((4096, 16),))
    assert add.why_not((4, 512), jnp.bfloat16) is None
    assert "4112 bytes" in (add.why_not((257, 8), jnp.bfloat16) or "")
    assert "multiples of 16" in (add.why_not((3, 5), jnp.bfloat16) or "")
    assert "int32" in (add.why_not((4, 8), jnp.int32) or "")
    x = jnp.zeros((4, 512), jnp.bfloat16)
    with pytest.raises(ValueError, match="no table of peers"):
        add(x, None)
    with pytest.raises(ValueError, match=r"shape \(9,\), not \(5,\)"):
        add(x, jnp.zeros(9, jnp.int32))
    with pytest.raises(ValueError, match=r"residual is bfloat16\(1, 512\)"):
        add(x, jnp.zeros(5, jnp.int32), x[:1])
    for wrong in ((1, 4096, ((1, 16),)), (2, 100, ((1, 16),)), (2, 4096, ((1, 2),)), (2, 4096, ())):
        with pytest.raises(ValueError):
            GpuAllReduce(*wrong)


def test_a_workspace_holds_its_counters_and_two_areas() -> None:
    assert workspace_bytes(MIB, 2) == COUNTER_BYTES + 4 * MIB
    for word in (NOTHING, NAN):  # in every type that it adds
        assert np.isnan(np.array([word], np.int32).view(jnp.bfloat16).astype(np.float32)).all()
        assert np.isnan(np.array([word], np.int32).view(np.float16)).all()
        assert np.isnan(np.array([word], np.int32).view(np.float32)).all()


def test_addresses_are_split_in_halves() -> None:
    from pallas_kernels.all_reduce.workspace import _tables

    low, high = 0xFFFF_0100, 0x7F12
    tables = np.array(_tables([(high << 32) | low, 512]), np.int32)
    assert tables[:, 0].tolist() == [0, 1]
    halves = tables[1].view(np.uint32)[1:].tolist()
    assert halves == [low, high, 512, 0]


def test_cpus_are_refused_and_the_table_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from pallas_kernels.all_reduce import dispatch
    from pallas_kernels.all_reduce.workspace import Workspaces, workspaces_or_why

    with pytest.raises(ValueError, match="no Hopper GPU"):
        Workspaces([jax.devices()[:2]], 4096)
    assert "no Hopper GPU" in (workspaces_or_why([jax.devices()[:2]], 4096)[1] or "")
    text = dispatch.TUNING.read_text()
    for enabled in (True, False):
        switched = tmp_path / f"{enabled}.json"
        switched.write_text(re.sub('"enabled": (true|false)', f'"enabled": {str(enabled).lower()}', text))
        monkeypatch.setattr(dispatch, "TUNING", switched)
        if not enabled:
            assert all_reduce_of([jax.devices()[:2]]) == (None, None)
            continue
        assert "not 3" in (hopper_all_reduce(3)[1] or "")
        if jax.__version_info__ >= (0, 11):
            kernel, why_not = all_reduce_of([jax.devices()[:2]])
            assert kernel is None
            assert "no Hopper GPU" in (why_not or "")
            for devices in (2, 4):
                kernel, why_not = hopper_all_reduce(devices)
                assert why_not is None
                assert kernel is not None
                assert kernel.num_devices == devices
                assert kernel.why_not((256, 4096), jnp.bfloat16) is None
                assert kernel.why_not_norm((256, 4096), jnp.bfloat16) is None
                assert "takes 1 to" in (kernel.why_not((2048, 4096), jnp.bfloat16) or "")
        else:
            assert "jax >= 0.11" in (all_reduce_of([jax.devices()[:2]])[1] or "")


def test_the_table_of_peers_is_that_of_the_innermost_trace() -> None:
    outer, inner = jnp.zeros(5, jnp.int32), jnp.ones(5, jnp.int32)
    with reaching(outer):
        with reaching(inner):
            assert current_peers() is inner
        assert current_peers() is outer
    assert current_peers() is None


def test_devices_that_cannot_reach_each_other_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without links, or with a driver that says nothing, there is a reason and no error; links count within a group."""
    from pallas_kernels.all_reduce import dispatch, workspace

    linked = {(0, 1), (1, 0), (2, 3), (3, 2)}

    class Driver:
        def linked(self, source: Device, target: Device) -> bool:
            if source.id > 3:
                raise RuntimeError("cuDeviceGet of the CUDA driver failed with error 100.")
            return (source.id, target.id) in linked

    monkeypatch.setattr(workspace, "_Cuda", Driver)
    a, b, c, d, e, f = (Device(i) for i in range(6))
    reason = dispatch._why_not
    assert reason([[a, b], [c, d]]) is None
    assert "no NVLink from 0 to 2" in (reason([[a, c], [b, d]]) or "")
    assert "error 100" in (reason([[e, f]]) or "")
    assert "another process" in (reason([[a, b], [c, Device(3, process_index=1)]]) or "")
    assert "no Hopper" in (reason([[a, Device(1, compute_capability="8.0")]]) or "")


@dataclass(frozen=True)
class Device:
    """What is asked of a GPU."""

    id: int
    process_index: int = 0
    compute_capability: str = "9.0"
    platform: str = "gpu"

    def __str__(self) -> str:
        return str(self.id)

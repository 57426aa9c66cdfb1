"""The NVLink all-reduce between Hopper GPUs against NCCL's and the oracle: ``JAX_PLATFORMS=cuda pytest -m gpu``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WIDTH, MOST_ROWS, CALLS, RUNS = 4096, 512, 25, 40


def why_not() -> str | None:
    if jax.__version_info__ < (0, 11) or jax.default_backend() != "gpu" or jax.device_count() < 2:
        return "needs two Hopper GPUs and jax >= 0.11"
    from pallas_kernels.all_reduce.workspace import why_not

    return why_not(group())


def group() -> list[jax.Device]:
    return jax.devices()[: 4 if jax.device_count() >= 4 else 2]


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
BY_DEVICE = PartitionSpec("model")


class Devices:
    """A mesh whose devices have workspaces for MOST_ROWS rows of float32."""

    def __init__(self) -> None:
        from pallas_kernels.all_reduce.gpu import GpuAllReduce
        from pallas_kernels.all_reduce.workspace import Workspaces

        capacity = MOST_ROWS * WIDTH * 4
        self.count = len(group())
        self.mesh = Mesh(np.array(group()), ("model",))
        self.workspaces = Workspaces([group()], capacity, trusting=True)
        self.peers = self.put(self.workspaces.peers[0])
        blocks = ((32768, 16), (1 << 19, 64), (capacity, 264))
        self.add = GpuAllReduce(self.count, capacity, blocks, norm_bytes=capacity)

    def put(self, parts: np.ndarray) -> jax.Array:
        """[devices, ...]: to each its own."""
        return jax.device_put(parts, NamedSharding(self.mesh, BY_DEVICE))

    def jit(self, function: Any) -> Any:
        """Of one device's parts, in a program whose devices start together (see ``GpuAllReduce``)."""

        def met(peers: jax.Array, *arrays: jax.Array) -> Any:
            # What is no number would stay none if multiplied by zero.
            finite = jnp.isfinite(arrays[0].reshape(-1)[:128]).astype(jnp.float32)
            one = lax.psum(finite * 0 + 1, "model")[0] / self.count
            first = arrays[0][0] * one.astype(arrays[0].dtype)
            results = function(peers[0], first, *(each[0] for each in arrays[1:]))
            return jax.tree.map(lambda leaf: leaf[None], results)

        program = jax.jit(
            jax.shard_map(met, mesh=self.mesh, in_specs=BY_DEVICE, out_specs=BY_DEVICE, check_vma=False)
        )
        return lambda *arrays: program(self.peers, *arrays)


@pytest.fixture(scope="module")
def devices() -> Devices:
    return Devices()


def bits(array: Any) -> np.ndarray:
    values = np.asarray(array)
    return values.view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize])


def in_order(parts: np.ndarray) -> np.ndarray:
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return total.astype(parts.dtype)


def test_the_driver_says_that_peers_may_write(devices: Devices) -> None:
    assert devices.workspaces.access == {3}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_equals_the_oracle_and_nccl_for_any_number_of_rows(devices: Devices, dtype: str) -> None:
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((devices.count, MOST_ROWS, WIDTH), np.float32).astype(jnp.dtype(dtype))
    expected = bits(in_order(parts))
    residual = rng.standard_normal(parts.shape[1:], np.float32).astype(parts.dtype)
    onto = bits((residual.astype(np.float32) + in_order(parts).astype(np.float32)).astype(parts.dtype))

    def sums(peers: jax.Array, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, ...]:
        total = devices.add(x, peers)
        more = devices.add(x, peers, residual + total[0, 0] * 0)  # one after the other
        return total, more, lax.psum(x.astype(jnp.float32), "model")

    program = devices.jit(sums)
    for rows in (1, 2, 3, 8, 17, 64, 255, 512):
        same = np.stack([residual[:rows]] * devices.count)
        found, more, nccl = program(devices.put(parts[:, :rows]), devices.put(same))
        for device in range(devices.count):
            np.testing.assert_array_equal(bits(found)[device], expected[:rows])
            np.testing.assert_array_equal(bits(more)[device], onto[:rows])
        error = np.abs(np.asarray(found, np.float32) - np.asarray(nccl))
        assert (error <= 2.0**-7 * np.abs(np.asarray(nccl)) + 1e-6).all()


@pytest.mark.parametrize("width", [1024, WIDTH, 8192])
def test_norms_what_it_added_up(devices: Devices, width: int) -> None:
    rng = np.random.default_rng(2)
    parts = rng.standard_normal((devices.count, 256, width), np.float32).astype(jnp.bfloat16)
    residual = rng.standard_normal((256, width), np.float32).astype(jnp.bfloat16)
    weight = rng.standard_normal(width, np.float32).astype(jnp.bfloat16)
    stream = residual.astype(np.float32) + in_order(parts).astype(np.float32)
    expected = stream.astype(jnp.bfloat16)
    exact = expected.astype(np.float32)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5)
    scaled = (exact.astype(jnp.bfloat16) * weight).astype(np.float32)
    program = devices.jit(lambda peers, x, residual, w: devices.add.with_norm(x, peers, residual, w, 1e-5))
    alone = None
    for rows in (1, 5, 64, 256):
        same = [devices.put(np.stack([each] * devices.count)) for each in (residual[:rows], weight)]
        hidden, normal = program(devices.put(parts[:, :rows]), *same)
        for device in range(devices.count):
            np.testing.assert_array_equal(bits(hidden)[device], bits(expected)[:rows])
            np.testing.assert_allclose(np.asarray(normal, np.float32)[device], scaled[:rows], rtol=2.0**-6)
            np.testing.assert_array_equal(bits(normal)[device], bits(normal)[0])
        alone = bits(normal)[0, 0] if alone is None else alone
        np.testing.assert_array_equal(bits(normal)[0, 0], alone)


def test_passes_on_what_is_no_number(devices: Devices) -> None:
    words = np.array([0xFFFFFFFF, 0x7FFF7FFF, 0x7F807F80, 0xFF80FF80, 0x80008000, 0], np.uint32)
    x = np.zeros((devices.count, 1, WIDTH), jnp.bfloat16)
    x.view(np.uint32)[:, 0, : 36 * 4].reshape(devices.count, 36, 4)[0] = np.repeat(words, 6)[:, None]
    x.view(np.uint32)[:, 0, : 36 * 4].reshape(devices.count, 36, 4)[1] = np.tile(words, 6)[:, None]
    for _ in range(3):
        found = np.asarray(devices.jit(lambda peers, x: devices.add(x, peers))(devices.put(x)))
        with np.errstate(invalid="ignore"):  # infinities of both signs are among them
            expected = in_order(x).astype(np.float32)
        for device in range(devices.count):
            np.testing.assert_array_equal(found[device].astype(np.float32), expected)


def test_a_thousand_calls_between_devices_that_dawdle(devices: Devices) -> None:
    """Of different sizes, each device late by its own random time before each call."""
    sizes = [(1, 512, 3, 64, 17, 256, 2, 128)[i % 8] for i in range(CALLS)]

    def chain(peers: jax.Array, parts: jax.Array, nanoseconds: jax.Array) -> list[jax.Array]:
        sums, before = [], jnp.zeros((), parts.dtype)
        for i, rows in enumerate(sizes):
            late = delay(nanoseconds[i : i + 1], before.astype(jnp.int32).reshape(1))
            x = parts[:rows] * 2.0 ** (i % 8) + late.astype(parts.dtype)
            sums.append(devices.add(x.astype(parts.dtype), peers))
            before = sums[-1][0, 0] * 0
        return sums

    rng = np.random.default_rng(1)
    parts = rng.standard_normal((devices.count, MOST_ROWS, WIDTH), np.float32).astype(jnp.bfloat16)
    expected, program = in_order(parts), devices.jit(chain)
    x = devices.put(parts)
    for run in range(RUNS):
        longest = (0, 2_000, 20_000, 200_000)[run % 4]
        times = rng.integers(0, longest + 1, (devices.count, CALLS)).astype(np.int32)
        for i, found in enumerate(program(x, devices.put(times))):
            whole = expected[: sizes[i]] * jnp.bfloat16(2.0 ** (i % 8))
            for device in range(devices.count):
                np.testing.assert_array_equal(
                    bits(found)[device], bits(whole), err_msg=f"run {run}, call {i}"
                )


def delay(nanoseconds: jax.Array, after: jax.Array) -> jax.Array:
    """int32[1] of zero, that many nanoseconds after ``after`` (zero) is there."""
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    def kernel(nanoseconds: Any, after: Any, out: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
        def sleep(ctx: Any, nanoseconds: Any, after: Any, out: Any) -> None:
            del ctx
            operands = [utils.memref_ptr(each) for each in (nanoseconds, after, out)]
            code = """{
                .reg .b32 time, zero;
                ld.global.b32 time, [$0];
                nanosleep.u32 time;
                ld.global.b32 zero, [$1];
                st.global.b32 [$2], zero;
            }"""
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), operands, code, "l,l,l", has_side_effects=True
            )  # fmt: skip

        sleep(nanoseconds, after, out)

    return plgpu.kernel(kernel, out_type=jax.ShapeDtypeStruct((1,), jnp.int32))(nanoseconds, after)

"""Memory of each GPU that its peers write to, and the tables of addresses that programs are given.

Peers' memory is reached by plain loads and stores over NVLink. No multicast object is made, here or by the kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from pallas_kernels.all_reduce.layout import COUNTER_BYTES, NOTHING, workspace_bytes

_ACCESS_SUPPORTED, _NATIVE_ATOMICS = 2, 3  # CUdevice_P2PAttribute
_ACCESS_FLAGS, _READ_WRITE = 16, 3  # CUpointer_attribute, CUmemAccess_flags
_INVALID_VALUE, _ALREADY_ENABLED = 1, 704  # CUresult


class Workspaces:
    """One workspace a device, for groups that add up among themselves. Programs may use it while this object lives.

    Attributes:
        peers: int32 [groups, devices of one, 1 + 2 * devices]: for every device what ``GpuAllReduce`` takes.
        access: what devices may do with their peers' workspaces by the driver's account: 3 is read and write.

    Args:
        groups: [groups, devices of one] of this process.
        capacity: bytes that a partial result has at most.
        trusting: go on whatever the driver says of the access.

    Raises:
        ValueError: of ``why_not``, or memory that a peer cannot write to.
    """

    def __init__(
        self, groups: Sequence[Sequence[jax.Device]], capacity: int, *, trusting: bool = False
    ) -> None:
        for group in groups:
            if (why := why_not(group)) is not None:
                raise ValueError(f"No all-reduce over peers' memory: {why}.")
        words = np.full(workspace_bytes(capacity, len(groups[0])) // 4, NOTHING, np.int32)
        words[: COUNTER_BYTES // 4] = 0
        self._arrays = [[jax.device_put(words, device) for device in group] for group in groups]
        jax.block_until_ready(self._arrays)  # nobody writes to a peer's before it is cleared
        addresses = [[array.unsafe_buffer_pointer() for array in group] for group in self._arrays]
        self.access = {
            flags for group, places in zip(groups, addresses, strict=True) for flags in _enable(group, places)
        }
        if not trusting and self.access != {_READ_WRITE}:
            raise ValueError(f"Peers cannot write to each other's workspaces (access flags {self.access}).")
        self.peers = np.array([_tables(places) for places in addresses], np.int32)

    def close(self) -> None:
        """Free the memory. No program may run that was given its addresses."""
        for array in (array for group in self._arrays for array in group):
            array.delete()
        self._arrays = []


def workspaces_or_why(
    groups: Sequence[Sequence[jax.Device]], capacity: int
) -> tuple[Workspaces | None, str | None]:
    """``Workspaces``; or None, and why devices that are linked cannot have them after all: their allocator may give
    memory that peers do not reach, or the driver refuse."""
    try:
        return Workspaces(groups, capacity), None
    except (ValueError, RuntimeError, OSError) as error:
        return None, str(error)


def _tables(addresses: Sequence[int]) -> list[list[int]]:
    """Of each device of a group."""
    halves = np.array(addresses, np.uint64).view(np.int32).tolist()  # little-endian: low half first
    return [[rank, *halves] for rank in range(len(addresses))]


def why_not(devices: Sequence[jax.Device]) -> str | None:
    """None if these devices can write to each other's memory over NVLink, else why not."""
    for device in devices:
        if device.platform not in ("gpu", "cuda") or str(getattr(device, "compute_capability", "")) != "9.0":
            return f"{device} is no Hopper GPU"
        if device.process_index != jax.process_index():
            return f"{device} is another process's"
    cuda = _Cuda()
    for source in devices:
        for target in devices:
            if source != target and not cuda.linked(source, target):
                return f"no NVLink from {source} to {target}"
    return None


def _enable(devices: Sequence[jax.Device], addresses: Sequence[int]) -> Iterator[int]:
    """Let every device reach the others' memory; says what it may do with these addresses there."""
    cuda = _Cuda()
    for source in devices:
        for target, address in zip(devices, addresses, strict=True):
            if source == target:
                continue
            cuda.enable(source, target)
            yield cuda.access(source, address)


class _Cuda:
    """The few calls of the CUDA driver that JAX has no words for."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")  # JAX runs on it, so it is there

    def linked(self, source: jax.Device, target: jax.Device) -> bool:
        """Whether peers' memory is reached over NVLink: only there are its atomics native."""
        return all(
            self._attribute(attribute, source, target) for attribute in (_ACCESS_SUPPORTED, _NATIVE_ATOMICS)
        )

    def enable(self, source: jax.Device, target: jax.Device) -> None:
        """Map all of the target's memory for the source. XLA may have done so."""
        with self._context(target) as other, self._context(source):
            self._call("cuCtxEnablePeerAccess", other, ctypes.c_uint(0), allowed=(_ALREADY_ENABLED,))

    def access(self, source: jax.Device, address: int) -> int:
        """What the source may do with memory at an address: 3 is read and write; 0 too if the driver cannot say."""
        flags = ctypes.c_uint64(0)  # the driver writes 4 bytes or 8
        with self._context(source):
            self._call(
                "cuPointerGetAttribute", ctypes.byref(flags), ctypes.c_int(_ACCESS_FLAGS), ctypes.c_uint64(address),
                allowed=(_INVALID_VALUE,),
            )  # fmt: skip
        return flags.value

    def _attribute(self, attribute: int, source: jax.Device, target: jax.Device) -> int:
        value = ctypes.c_int(0)
        self._call(
            "cuDeviceGetP2PAttribute", ctypes.byref(value), ctypes.c_int(attribute), self._device(source),
            self._device(target),
        )  # fmt: skip
        return value.value

    def _device(self, device: jax.Device) -> Any:
        handle = ctypes.c_int(0)
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device.local_hardware_id))
        return handle

    @contextmanager
    def _context(self, device: jax.Device) -> Iterator[ctypes.c_void_p]:
        """The device's primary context, which XLA uses as well, current in this thread."""
        handle, context = self._device(device), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield context
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", handle)

    def _call(self, name: str, *arguments: Any, allowed: tuple[int, ...] = ()) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0 and result not in allowed:
            raise RuntimeError(f"{name} of the CUDA driver failed with error {result}.")

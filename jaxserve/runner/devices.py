"""The devices of an engine: what this process has, and where the engine's arrays lie among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxserve.config import ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.runner.kv_arrays import device_memory as memory_of
from jaxserve.runner.placement import Placement
from sharding import make_mesh
from sharding.distributed import smallest


def platform_name() -> str:
    """``cpu``, ``gpu`` or ``tpu``: what this process's devices are."""
    return jax.default_backend()


def device_memory() -> int | None:
    """Bytes of one of this process's devices, None if it does not tell; of several processes the least."""
    return smallest(memory_of(jax.local_devices()[0]) or 0) or None


def place(parallel: ParallelConfig, compiler_options: tuple[tuple[str, Any], ...] = ()) -> Placement:
    """The devices that the user asked for, of all that there are.

    Args:
        parallel: how many along which axis.
        compiler_options: of every program.

    Raises:
        ConfigError: there are fewer, or a host would have none of them.
    """
    devices = jax.devices()
    check_enough(parallel, len(devices))
    if parallel.num_devices == 1:
        placement = Placement(compiler_options=compiler_options)
    else:
        tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
        placement = Placement(make_mesh(tensor, devices, data_parallel_size=data), compiler_options)
    if jax.process_count() > 1:
        _check_no_host_idle(parallel, placement, devices)
    return placement


def check_enough(parallel: ParallelConfig, available: int) -> None:
    """Refuse more devices than there are.

    Raises:
        ConfigError: saying what would fit.
    """
    if parallel.num_devices <= available:
        return
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    fitting = [f"-tp {t} -dp {available // t}" for t in range(1, available + 1) if available % t == 0]
    raise ConfigError(
        f"tensor_parallel_size {tensor} x data_parallel_size {data} needs {parallel.num_devices} devices, but "
        f"there are {available}. All of them are used by: {', '.join(fitting)}.",
        param="tensor_parallel_size" if data == 1 else "data_parallel_size",
    )


def _check_no_host_idle(
    parallel: ParallelConfig, placement: Placement, devices: Sequence[jax.Device]
) -> None:
    idle = {device.process_index for device in devices} - {d.process_index for d in placement.devices}
    if not idle:
        return
    tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
    raise ConfigError(
        f"tensor_parallel_size {tensor} x data_parallel_size {data} leaves hosts {sorted(idle)} without work: "
        f"the {jax.process_count()} hosts have {len(devices)} devices. Leave idle hosts out of --nnodes.",
        param="tensor_parallel_size",
    )

"""Topologies by the names that clouds sell them under, and what a device of each generation has (``hardware.json``)."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jaxserve.errors import ConfigError

LIBTPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
}  # fmt: skip
"""So that libtpu neither asks the cloud for a TPU, nor wants to own it alone, nor complains that there is none."""


@dataclass(frozen=True)
class Topology:
    """A slice or a node: so many equal devices.

    Args:
        name: as the user gave it, such as ``v6e-8``.
        generation: ``v6e``, the name that the TPU kernels' tuning tables know.
        platform: ``tpu`` or ``gpu``.
        device_kind: what JAX calls a device.
        num_devices: JAX devices, which are not always the number in the name: v5p counts two a device.
        hbm_bytes: of a device, as programs may use them.
        hbm_bytes_per_second, bf16_flops, link_bytes_per_second: peaks of a device; links count what it sends.
        link: what connects devices.
        compiler_name: what libtpu calls the topology; None where no compiler can be had without the device.
    """

    name: str
    generation: str
    platform: str
    device_kind: str
    num_devices: int
    hbm_bytes: int
    hbm_bytes_per_second: float
    bf16_flops: float
    link_bytes_per_second: float
    link: str
    compiler_name: str | None

    def devices(self) -> list[Any]:
        """Devices that programs can be compiled for, and nothing else. No TPU is touched.

        Raises:
            ConfigError: there is no compiler for them, or it is not installed.
        """
        if self.compiler_name is None:
            raise ConfigError(
                f"Nothing can be compiled for {self.name} without its devices: add --no-compile.",
                param="topology",
            )
        if importlib.util.find_spec("libtpu") is None:
            raise ConfigError(
                "Compiling for TPUs needs libtpu, which is not installed: pip install 'jaxserve[tpu]', or add "
                "--no-compile for the arithmetic alone.",
                param="no_compile",
            )
        for variable, value in LIBTPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        from jax.experimental import topologies

        chips = [int(side) for side in self.compiler_name.partition(":")[2].split("x")]
        host = chips if len(chips) == 2 and math.prod(chips) <= 8 else [min(side, 2) for side in chips[:2]]
        host = [*host, 1][:3]
        found = topologies.get_topology_desc(
            topology_name=self.compiler_name, platform="tpu", chips_per_host_bounds=host
        )
        return list(found.devices)


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads((resources.files("jaxserve.plan") / "hardware.json").read_text())


def topology_names() -> list[str]:
    """Every name that ``find_topology`` takes."""
    generations: dict[str, Any] = _table()["generations"]
    return [f"{name}-{count}" for name, entry in generations.items() for count in entry["shapes"]]


def find_topology(name: str) -> Topology:
    """A topology by name.

    Raises:
        ConfigError: listing the known ones.
    """
    match = re.fullmatch(r"(\w+)-(\d+)", name)
    entry = _table()["generations"].get(match[1]) if match else None
    if match is None or entry is None or match[2] not in entry["shapes"]:
        raise ConfigError(
            f"topology {name!r} is not known; known are {', '.join(topology_names())}.", param="topology"
        )
    pattern: str | None = entry["topology"]
    return Topology(
        name=name,
        generation=match[1],
        platform=entry["platform"],
        device_kind=entry["device_kind"],
        num_devices=int(int(match[2]) * entry["devices_per_name_unit"]),
        hbm_bytes=int(entry["hbm_gib"] * 2**30),
        hbm_bytes_per_second=entry["hbm_gb_s"] * 1e9,
        bf16_flops=entry["bf16_tflops"] * 1e12,
        link_bytes_per_second=entry["link_gb_s"] * 1e9,
        link=entry["link"],
        compiler_name=None if pattern is None else pattern.format(shape=entry["shapes"][match[2]]),
    )

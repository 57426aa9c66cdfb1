"""TPU generations: the names that devices report, and the memory that kernels have to fit into."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any


@functools.cache
def generations() -> Mapping[str, Any]:
    """``v5e``, …: device kinds, MiB of VMEM and KiB of SMEM a core, cores a device."""
    return json.loads(resources.files(__package__).joinpath("tpu_generations.json").read_text())


def generation_of(device_kind: str) -> str:
    """The generation (``v5e``, …) of a device kind as JAX reports it.

    Raises:
        ValueError: for a kind that the table does not list.
    """
    for name, entry in generations().items():
        if device_kind == name or device_kind in entry["device_kinds"]:
            return name
    raise ValueError(
        f"no TPU kernel tuning for device kind {device_kind!r}; known are {', '.join(generations())}: "
        "add it to tpu_generations.json, or use the portable blocked attention"
    )

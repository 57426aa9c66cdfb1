"""What is tuned of the Hopper experts of few tokens, and what ``gpu_tuning.json`` says of it.

``gpu_few_mlp`` says the ideas behind it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

ROWS = 64
"""Outputs of one instruction, and the elements of a swizzled line."""


@dataclass(frozen=True)
class FewConfig:
    """What is tuned of one of the two kernels.

    Args:
        consumers: multiplying warpgroups, 1 or 2.
        blocks: of 64 outputs (the first kernel: 64 of gate and 64 of up) that each of them computes of a tile.
        step: contracted elements loaded at a time, 64 or a multiple; 64 where it does not divide them.
        stages: steps in flight, 2 or more; as many as fit into the shared memory where there is no room for them.
    """

    consumers: int = 1
    blocks: int = 1
    step: int = 128
    stages: int = 6

    def __post_init__(self) -> None:
        if self.consumers not in (1, 2) or self.blocks < 1 or self.step % ROWS or self.stages < 2:
            raise ValueError(
                f"{self}: consumers are 1 or 2, blocks 1 or more, step a multiple of 64, stages 2 or more"
            )

    @property
    def outputs(self) -> int:
        """Of a tile, of which the first kernel computes gate and up."""
        return self.consumers * self.blocks * ROWS


@functools.cache
def table() -> tuple[tuple[int, tuple[FewConfig, FewConfig] | FewConfig], ...]:
    """The tuning table's entries: most tokens, and configurations."""
    file = resources.files("pallas_kernels.grouped_matmul") / "gpu_tuning.json"

    def configs(entry: dict[str, Any]) -> tuple[FewConfig, FewConfig] | FewConfig:
        if "both" in entry:
            return FewConfig(**entry["both"])
        return FewConfig(**entry["gate_up"]), FewConfig(**entry["down"])

    return tuple((entry["tokens"], configs(entry)) for entry in json.loads(file.read_text())["few"])

"""SmallChunks: memory for the few bytes that come and go with every step, away from what programs work in.

XLA plays a program's kernels as a CUDA graph and rewrites it, in 10 us a kernel, whenever a buffer lies elsewhere than
last time. All of a step's arguments stay where they are (``StepBuffers``); its temporaries do only if the largest free
chunk begins where it began. But XLA's allocator (best fit, neighbours that are free become one) takes a small array out
of the beginning of that chunk where it has no smaller one: the input of a step, or what it sampled. So temporaries
moved every other step, as these were freed sooner or later. Here the allocator gets enough small chunks that nothing
free borders on.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

SIZES = tuple(256 << power for power in range(11))
"""Bytes, up to 256 KiB: inputs of 8,192 tokens have 100 KiB, log probabilities of 1,024 rows as much."""
COUNT = 8
"""Of each size: two steps run at a time, and what was read is freed late."""
GUARD = 256
"""Bytes that keep two chunks apart."""


class SmallChunks:
    """Leaves free chunks of ``SIZES`` on each device; keep it for as long as they shall not grow together.

    Args:
        devices: of this process.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._guards: list[jax.Array] = []
        for device in devices:
            chunks: list[jax.Array] = []
            for size in SIZES * COUNT:
                chunks.append(_allocated(size, device))
                self._guards.append(_allocated(GUARD, device))
            for chunk in chunks:
                chunk.delete()

    def close(self) -> None:
        """Give the memory back."""
        for guard in self._guards:
            guard.delete()
        self._guards.clear()


def _allocated(num_bytes: int, device: jax.Device) -> jax.Array:
    """An array that has its memory: what comes after it is placed after it."""
    return jax.block_until_ready(jax.device_put(np.zeros(num_bytes, np.uint8), device))

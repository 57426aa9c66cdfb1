"""Several processes as one JAX program: start, end, and a number that all agree on."""

from __future__ import annotations

import jax
import numpy as np

START_SECONDS = 300
SHUTDOWN_SECONDS = 20


def initialize(coordinator: str, num_processes: int, process_id: int) -> None:
    """Join the other processes; before anything looks for devices.

    Args:
        coordinator: ``host:port`` of process 0, where JAX's coordination service listens.
        num_processes: of all.
        process_id: this one's, from 0.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # read by CPU clients only
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=START_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )


def shutdown() -> None:
    """Leave; waits for the others to do so."""
    jax.distributed.shutdown()


def smallest(value: int) -> int:
    """The smallest ``value`` of all processes, which all call this. Of one process: its own."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    # Two 30-bit halves: without x64 JAX's integers have 32 bits.
    halves = np.array([value >> 30, value & (1 << 30) - 1], np.int32)
    gathered = np.asarray(multihost_utils.process_allgather(halves)).astype(np.int64)
    return int(((gathered[:, 0] << 30) | gathered[:, 1]).min())

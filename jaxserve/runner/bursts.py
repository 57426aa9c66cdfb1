"""choose_bursts: whether decode steps go to the device several at a time, and how many."""

from __future__ import annotations

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.sampling.metadata import MAX_TOP
from jaxserve.step import BurstLimits

DEFAULT_STEPS = 4
"""With them the host has the time of four steps for what takes it that of two or three."""
MAX_ROWS = 32
"""With more rows a step takes the device longer, and reading the tokens takes the host longer either way."""
FAST_BYTES = 6 << 30
"""Weights that an H200 reads in 1.5 ms: about what a step takes the host, for each device that it dispatches to."""


def choose_bursts(
    num_steps: int | None, *, platform: str, config: EngineConfig, block_size: int, device_bytes: int
) -> BurstLimits | None:
    """The bursts of an engine; None: every step is dispatched alone.

    Args:
        num_steps: ``num_scheduler_steps``; None: what pays.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        config: for what rules bursts out.
        block_size: tokens in a block.
        device_bytes: of a device's weights.

    Raises:
        ConfigError: they were asked for where there are none.
    """
    why_not = _why_not(config)
    if num_steps is None:
        devices = config.parallel_config.num_devices
        pays = platform == "gpu" and why_not is None and device_bytes <= FAST_BYTES * devices
        num_steps = DEFAULT_STEPS if pays else 1
    if num_steps == 1:
        return None
    if why_not is not None:
        raise ConfigError(f"num_scheduler_steps is {num_steps}, but {why_not}", param="num_scheduler_steps")
    if num_steps > block_size:
        raise ConfigError(
            f"num_scheduler_steps is {num_steps}, more than a block's tokens (block_size is {block_size}). Lower it.",
            param="num_scheduler_steps",
        )
    return BurstLimits(num_steps, MAX_ROWS, MAX_TOP)


def _why_not(config: EngineConfig) -> str | None:
    if config.compilation_config.batch_invariant:
        return "with batch_invariant every step is dispatched alone, by one program. Leave one of them out."
    ranks = config.parallel_config.data_parallel_size
    if ranks > 1:
        return (
            f"with data_parallel_size {ranks} every step is dispatched alone. Leave num_scheduler_steps out."
        )
    return None

"""choose_bursts: whether decode steps go to the device several at a time, and how many."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.sampling.metadata import MAX_TOP
from jaxserve.step import BurstLimits

DEFAULT_STEPS = 4
"""The host, which takes as long as two or three steps of a small model, has the time of four."""
MOST_ROWS = 32
"""With more rows, reading the tokens takes the host longer either way."""
FAST_BYTES = 8e9
"""Weights that an H200 reads in 1.7 ms: about what a step takes the host, for each device that it dispatches to."""


def choose_bursts(
    config: EngineConfig, *, platform: str, block_size: int, bytes_read: Callable[[int], float]
) -> BurstLimits | None:
    """The bursts of an engine; None: every step is dispatched alone.

    Args:
        config: how many steps they shall have, and what rules them out.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        block_size: tokens in a block.
        bytes_read: what a device reads of its weights in a step of so many rows.

    Raises:
        ConfigError: they were asked for where there are none.
    """
    asked, why_not = config.scheduler_config.num_scheduler_steps, _why_not(config)
    if asked == 1 or (asked is None and (why_not is not None or platform != "gpu")):
        return None
    if why_not is not None:
        raise ConfigError(f"num_scheduler_steps is {asked}, but {why_not}", param="num_scheduler_steps")
    if asked is None:
        fast = FAST_BYTES * config.parallel_config.num_devices
        rows = [rows for rows in (1, *range(8, MOST_ROWS + 1, 8)) if bytes_read(rows) <= fast]
        return BurstLimits(min(DEFAULT_STEPS, block_size), rows[-1], MAX_TOP) if rows else None
    if asked > block_size:
        raise ConfigError(
            f"num_scheduler_steps is {asked}, more than a block's tokens (block_size is {block_size}). Lower it.",
            param="num_scheduler_steps",
        )
    return BurstLimits(asked, MOST_ROWS, MAX_TOP)


def _why_not(config: EngineConfig) -> str | None:
    if config.compilation_config.batch_invariant:
        return "with batch_invariant every step is dispatched alone, by one program. Leave one of them out."
    ranks = config.parallel_config.data_parallel_size
    if ranks > 1:
        return (
            f"with data_parallel_size {ranks} every step is dispatched alone. Leave num_scheduler_steps out."
        )
    return None

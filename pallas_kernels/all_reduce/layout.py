"""Where things lie in memory that peers write to: counters of calls, then two areas of a slot for each sender."""

from __future__ import annotations

MOST_BLOCKS = 512
"""CTAs of a call at most; each has a counter."""
COUNTER_BYTES = 4 * MOST_BLOCKS
NOTHING = -1
"""A word (int32) that has not come yet: a pair of NaNs in 16 bits, one in 32."""
NAN = 0x7FFF7FFF
"""What is sent where a partial result has the word ``NOTHING``: NaN as well."""


def workspace_bytes(capacity: int, num_devices: int) -> int:
    """Bytes of one device's workspace for partial results of at most ``capacity`` bytes."""
    return COUNTER_BYTES + 2 * num_devices * capacity

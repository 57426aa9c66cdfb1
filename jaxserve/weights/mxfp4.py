"""MXFP4 (OCP Microscaling Formats, 2023): 4-bit floats in blocks of 32 with a power of two each, made bfloat16."""

from __future__ import annotations

import ml_dtypes
import numpy as np

VALUES = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32
)
"""What each of the 16 codes (E2M1) stands for."""
BLOCK_BYTES = 16
"""Bytes of a block of 32 values, two a byte, the first in the low half."""
SCALE_BIAS = 127
"""A scale byte s stands for 2 ** (s - 127)."""


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values in bfloat16, which holds every one of them exactly.

    One matrix of the first dimension at a time, so that float32 copies stay small.

    Args:
        blocks: uint8 [E, N, G, 16].
        scales: uint8 [E, N, G].

    Returns:
        bfloat16 [E, N, 32 G].
    """
    experts, rows, groups, _ = blocks.shape
    values = np.empty((experts, rows, groups * 2 * BLOCK_BYTES), ml_dtypes.bfloat16)
    for expert in range(experts):
        pairs = np.stack([VALUES[blocks[expert] & 0xF], VALUES[blocks[expert] >> 4]], axis=-1)
        exponents = scales[expert].astype(np.int32)[..., None, None] - SCALE_BIAS
        values[expert] = np.ldexp(pairs, exponents).reshape(rows, -1)
    return values

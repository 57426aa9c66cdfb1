"""StepLayout: where each part of a step's host input lies in the one int32 buffer that travels to the device.

The host writes through numpy views, the jitted step reads the same fields with static slices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxserve.runner.buckets import Bucket
from jaxserve.sampling.metadata import NUM_COLUMNS

FROM_DEVICE = -1
"""Token id that means: the token this row sampled last, which only the device knows."""


@dataclass(frozen=True)
class StepLayout:
    """Fields of one bucket's buffer.

    Args:
        bucket: T and R.
        block_size: tokens a block.
        max_num_seqs: S; the row index of padding rows.
        num_steps: decode steps of a burst; such a buffer says how many rows take part in each.
    """

    bucket: Bucket
    block_size: int
    max_num_seqs: int
    num_steps: int = 1

    @property
    def num_patches(self) -> int:
        """Block table entries one step can set: a decoding row (also in a burst) needs one at most, new tokens one a
        block.

        More (a long cached prefix) go through a program of their own before the step.
        """
        return self.bucket.num_rows + self.bucket.num_tokens // self.block_size + 8

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Name -> (offset, shape)."""
        tokens, rows = self.bucket.num_tokens, self.bucket.num_rows
        shapes: dict[str, tuple[int, ...]] = {
            # In every bucket's buffer these come first, where a step's second half finds them (``split_head``).
            "step_features": (1,),
            "bucket_rows": (1,),
            "sampling": (rows, NUM_COLUMNS),
            "token_ids": (tokens,),
            "query_start_loc": (rows + 1,),
            "num_computed_tokens": (rows,),
            "row_index": (rows,),
            "distribution": (3,),
            "patch_rows": (self.num_patches,),
            "patch_columns": (self.num_patches,),
            "patch_blocks": (self.num_patches,),
        }
        if self.num_steps > 1:
            shapes["live_rows"] = (self.num_steps,)
        fields: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += math.prod(shape)
        return fields

    @cached_property
    def size(self) -> int:
        """Elements of the buffer."""
        return max(stop for _, _, stop, _ in self._parts)

    @cached_property
    def _parts(self) -> tuple[tuple[str, int, int, tuple[int, ...]], ...]:
        """(name, start, stop, shape) of each field: worked out once, used in every step."""
        return tuple((name, at, at + math.prod(shape), shape) for name, (at, shape) in self.fields.items())

    @cached_property
    def _slices(self) -> dict[str, slice]:
        return {name: slice(start, stop) for name, start, stop, _ in self._parts}

    def slice_of(self, name: str) -> slice:
        """Where a field lies: for one that is wanted alone."""
        return self._slices[name]

    def split(self, buffer: Any) -> dict[str, Any]:
        """Views (numpy) or static slices (traced arrays) of the fields."""
        return {
            name: buffer[start:stop] if len(shape) == 1 else buffer[start:stop].reshape(shape)
            for name, start, stop, shape in self._parts
        }


def head_size(num_rows: int) -> int:
    """Elements of a buffer that ``split_head`` reads for so many rows."""
    return 2 + num_rows * NUM_COLUMNS


def split_head(buffer: Any, num_rows: int) -> tuple[Any, Any, Any]:
    """``step_features``, ``bucket_rows`` and the first ``num_rows`` of ``sampling`` of any bucket's buffer.

    Rows from ``bucket_rows`` on are something else.
    """
    return buffer[0:1], buffer[1:2], buffer[2 : head_size(num_rows)].reshape(num_rows, NUM_COLUMNS)

"""Overlap: a Mosaic GPU kernel that begins while the one before it ends (CUDA's programmatic dependent launch).

Central idea: between two kernels a GPU ends the one, launches the other and fills its pipelines. A kernel that overlaps
is launched once all CTAs of the one before have begun; its own begin as multiprocessors get free, bring what no kernel
writes (weights, where they are arguments of the program and not computed in it), and wait with all else. Every kernel
that overlaps waits, so whoever has waited sees what all kernels before it wrote, not only the last. XLA's own kernels
must come as they always do, when ours have ended: their loads may be moved to before a wait.

It is off, and has not run on a GPU yet: neither launched one after another nor inside a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

enabled = False
"""All kernels overlap: to be set before anything is traced, as ``benchmarks/offline.py --overlap`` does."""


def let_next_begin(*, compiled: bool) -> None:
    """The kernel that comes next may be launched once every CTA has come here, or ended.

    Args:
        compiled: not interpreted.
    """
    if enabled and compiled:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.griddepcontrol_launch_dependents()


def wait_for_earlier(*, compiled: bool) -> None:
    """Wait until all earlier kernels have ended and what they wrote can be seen. Before it nothing may be read that a
    kernel writes, and nothing written; each warpgroup waits for itself.

    Args:
        compiled: not interpreted.
    """
    if enabled and compiled:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        plgpu.griddepcontrol_wait()


def waits_first(body: Callable[..., None], *, compiled: bool) -> Callable[..., None]:
    """The body of a kernel that brings nothing before it waits."""

    @functools.wraps(body)
    def kernel(*refs: Any, **scratch: Any) -> None:
        let_next_begin(compiled=compiled)
        wait_for_earlier(compiled=compiled)
        body(*refs, **scratch)

    return kernel

"""Which kernel adds up tensor-parallel devices' few tokens, if not the platform's collective."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

TUNING = Path(__file__).with_name("gpu_tuning.json")


class AllReduce(Protocol):
    """The sum of partial results over devices that reach each other's memory. Stateless: a static part of the model.

    All devices make the same calls in the same order, one at a time.
    """

    num_devices: int
    capacity: int
    """Bytes of the largest partial result."""

    @property
    def name(self) -> str:
        """Of what computes it."""
        ...

    def why_not(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        """Why arrays of that shape are left to the platform's collective; None: they are not."""
        ...

    def __call__(
        self, partial: jax.Array, peers: jax.Array | None, residual: jax.Array | None = None
    ) -> jax.Array:
        """Add up.

        Args:
            partial: [T, M], this device's.
            peers: int32[1 + 2 * num_devices], of ``peers.current_peers``.
            residual: [T, M], the same on all devices, added to the rounded sum.

        Returns:
            [T, M]: the devices' results added in their order in float32, rounded once: the same bits on all devices,
            and of a row whatever the number of rows. With a residual that sum is rounded again.
        """
        ...

    def why_not_norm(self, shape: tuple[int, ...], dtype: Any) -> str | None:
        """Why ``with_norm`` does not take arrays of that shape; None: it does."""
        ...

    def with_norm(
        self, partial: jax.Array, peers: jax.Array | None, residual: jax.Array, weight: jax.Array, eps: float,
        layer: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """The sum with the residual added, as a call returns it, and the RMS norm of that, times ``weight`` [M].

        With a ``layer``, int32[1], ``weight`` is [L, M], and this is the one: XLA would cut it out first.
        """
        ...


def all_reduce_of(groups: Sequence[Sequence[jax.Device]]) -> tuple[AllReduce | None, str | None]:
    """The kernel for groups of GPUs that add up among themselves; or None, and why, if it is not switched off.

    Args:
        groups: [groups, devices of one].
    """
    kernel, why_not = hopper_all_reduce(len(groups[0]))
    if kernel is not None:
        why_not = _why_not(groups)
    return (kernel if why_not is None else None), why_not


def hopper_all_reduce(num_devices: int) -> tuple[AllReduce | None, str | None]:
    """``all_reduce_of`` so many Hopper GPUs that reach each other, on this version of JAX."""
    table = json.loads(TUNING.read_text())
    if not table["enabled"]:
        return None, None
    tuning = table["devices"].get(str(num_devices))
    if tuning is None:
        return (
            None,
            f"the Hopper all-reduce is tuned for {' and '.join(table['devices'])} devices, not {num_devices}",
        )
    if jax.__version_info__ < (0, 11):
        return (
            None,
            f"the Hopper all-reduce needs jax >= 0.11 (Python >= 3.12), this is jax {jax.__version__}",
        )
    # Pallas' GPU half takes a while to import, and no other platform needs it.
    from pallas_kernels.all_reduce.gpu import GpuAllReduce

    blocks = tuple((most, count) for most, count in tuning["blocks"])
    return GpuAllReduce(num_devices, tuning["most_bytes"], blocks, tuning["norm_bytes"]), None


def _why_not(groups: Sequence[Sequence[jax.Device]]) -> str | None:
    from pallas_kernels.all_reduce.workspace import why_not

    try:
        return next(filter(None, map(why_not, groups)), None)
    except (OSError, RuntimeError) as error:  # no driver of that name, or one that refuses to say
        return str(error)

"""Which kernel computes the dense products of a device, if not XLA: one contract, whatever computes it."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from pallas_kernels.hopper import hopper_why_not


class DenseMatmul(Protocol):
    """Rows by a weight, and what follows that in a layer. Stateless: it is a static part of the model.

    Calls of one program must not run at the same time: they share counters.
    """

    @property
    def name(self) -> str:
        """Of what computes it."""
        ...

    @property
    def invariant(self) -> bool:
        """It is ``for_all_rows``: XLA must round the products that are left to it where this does."""
        ...

    def why_not(
        self,
        num_rows: int,
        outputs: int,
        inner: int,
        dtype: Any,
        *,
        gated: bool = False,
        residual: bool = False,
    ) -> str | None:
        """Why so many rows by an [outputs, inner] weight of this type are left to XLA; None: they are not."""
        ...

    def for_all_rows(self) -> DenseMatmul:
        """The same with one order of sums for all numbers of rows, though XLA be faster for some.

        What it leaves to XLA all the same, XLA adds up in that order if its choice of algorithms is pinned; and rounds
        as this does if nothing that follows becomes a part of the product, unless it is a residual.
        """
        ...

    def __call__(
        self, x: jax.Array, weight: jax.Array, *, residual: jax.Array | None = None, gated: bool = False,
        out_dtype: Any = None,
    ) -> jax.Array:  # fmt: skip
        """Multiply one device's rows by its weight.

        Args:
            x: [T, K].
            weight: [N, K] of the same type, outputs first.
            residual: [T, N] added to the product in float32; the sum alone is rounded, as cuBLAS does.
            gated: the weight is a gate's N / 2 rows and as many others: silu(gate) * other, both rounded before.
            out_dtype: float32 leaves the sums as they are, without the two above.

        Returns:
            [T, N], or [T, N / 2] with ``gated``. A row's bits do not depend on the other rows or their number.
        """
        ...


def dense_matmul_of(platform: str) -> tuple[DenseMatmul | None, str | None]:
    """The kernel of ``cpu``, ``gpu`` or ``tpu``, None where there is none and XLA computes everything, and why."""
    if platform != "gpu":
        return None, None
    if (why_not := hopper_why_not("the Hopper dense product")) is not None:
        return None, why_not
    # Pallas' GPU half takes a while to import, and no other platform needs it.
    from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

    return GpuDenseMatmul(), None

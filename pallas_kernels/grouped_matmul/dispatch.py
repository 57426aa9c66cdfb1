"""Choosing the grouped matmul of a device: one contract, whatever computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import blocked
from pallas_kernels.grouped_matmul.few import Chosen, Rule
from pallas_kernels.grouped_matmul.gated import gated
from pallas_kernels.grouped_matmul.route import Routed
from pallas_kernels.hopper import hopper_why_not

_OUTPUTS_FIRST = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class FewTokens(Protocol):
    """Whole experts of few tokens, whose time is that of reading the weights. Stateless, like ``GroupedMatmul``."""

    def why_not(self, num_tokens: int, ffn_size: int, hidden_size: int, dtype: Any) -> str | None:
        """Why so many tokens' experts are left to the two grouped products; None: they are not."""
        ...

    def why_not_choose(self, num_tokens: int, num_experts: int) -> str | None:
        """Why so many tokens' choice among so many experts is left to others; None: it is not."""
        ...

    def routed(
        self,
        x: jax.Array,
        logits: jax.Array,
        live: jax.Array,
        rule: Rule,
        gate_up: jax.Array,
        down: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """``few.choose`` and ``few.gated_mlp``.

        Args:
            x: [T, M].
            logits: float32 [T, E].
            live: bool [T].
            rule: how experts are chosen.
            gate_up, down: as for ``__call__``.

        Returns:
            (float32 [T, M], int32 [E]: the tokens that each expert got).
        """
        ...

    def __call__(self, x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: Chosen) -> jax.Array:
        """What ``few.gated_mlp`` says. In which order it is added up may depend on the experts in use.

        Args:
            x: [T, M].
            gate_up: [E, 2, F, M].
            down: [E, M, F].
            chosen: one device's experts.

        Returns:
            float32 [T, M].
        """
        ...


class Route(Protocol):
    """The choice of many tokens' experts with what sorting takes. Stateless, like ``GroupedMatmul``."""

    def why_not(self, num_tokens: int, num_experts: int) -> str | None:
        """Why so many tokens' choice among so many experts is left to others; None: it is not."""
        ...

    def __call__(self, logits: jax.Array, live: jax.Array, rule: Rule) -> Routed:
        """What ``route.route`` says.

        Args:
            logits: float32 [T, E].
            live: bool [T].
            rule: how.
        """
        ...


class GroupedMatmul(Protocol):
    """Rows, sorted by group, each by the matrix of its group. Stateless: it is a static part of the model."""

    @property
    def name(self) -> str:
        """Of what computes it."""
        ...

    @property
    def few(self) -> FewTokens | None:
        """What takes few tokens' experts as a whole, if there is such a thing."""
        ...

    @property
    def route(self) -> Route | None:
        """What chooses many tokens' experts, if there is such a thing."""
        ...

    def why_not(self, outputs: int, inner: int, dtype: Any) -> str | None:
        """Why [outputs, inner] matrices of this type are left to the portable path; None: they are not."""
        ...

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Multiply one device's rows by its matrices.

        Args:
            lhs: [N, K], padding rows last.
            rhs: [E, M, K], outputs first, as weights are.
            group_sizes: int32 [E] rows of each group; they may add up to less than N.

        Returns:
            [N, M] in lhs's type, accumulated in float32. Padding rows are zero, whatever they held.
        """
        ...

    def gated(self, lhs: jax.Array, gate_up: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """[N, F], silu(gate) * up: lhs [N, M] by matrices [E, 2, F, M]; the rest is as for ``__call__``."""
        ...


@dataclass(frozen=True)
class PortableGroupedMatmul:
    """Plain XLA, any types and sizes: a loop over blocks of rows on CPUs, elsewhere ``jax.lax.ragged_dot``."""

    name: str = "portable"
    few: None = None
    route: None = None

    def why_not(self, outputs: int, inner: int, dtype: Any) -> str | None:
        return None

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return grouped_matmul(lhs, rhs, group_sizes)

    def gated(self, lhs: jax.Array, gate_up: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return gated(grouped_matmul, lhs, gate_up, group_sizes)


PORTABLE = PortableGroupedMatmul()


@dataclass(frozen=True)
class WhereItCan:
    """A device's kernel, and the portable path for what that cannot do (``why_not``)."""

    kernel: GroupedMatmul

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def few(self) -> FewTokens | None:
        return self.kernel.few

    @property
    def route(self) -> Route | None:
        return self.kernel.route

    def why_not(self, outputs: int, inner: int, dtype: Any) -> str | None:
        return self.kernel.why_not(outputs, inner, dtype)

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return (self.kernel if self._can(lhs, rhs) else PORTABLE)(lhs, rhs, group_sizes)

    def gated(self, lhs: jax.Array, gate_up: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return (self.kernel if self._can(lhs, gate_up) else PORTABLE).gated(lhs, gate_up, group_sizes)

    def _can(self, lhs: jax.Array, rhs: jax.Array) -> bool:
        outputs = math.prod(rhs.shape[1:-1])
        return lhs.dtype == rhs.dtype and self.why_not(outputs, rhs.shape[-1], rhs.dtype) is None


def grouped_matmul_of(platform: str) -> tuple[GroupedMatmul, str | None]:
    """What computes it on ``cpu``, ``gpu`` or ``tpu``, and why it is not the device's own kernel (None: it is).

    Raises:
        ValueError: a TPU that the kernel has no tile sizes for.
    """
    # Pallas' TPU and GPU halves take a while to import, and no other platform needs them.
    if platform == "tpu":
        from pallas_kernels.grouped_matmul.tpu import TpuGroupedMatmul, generation_of

        return WhereItCan(TpuGroupedMatmul(generation_of(jax.local_devices()[0].device_kind))), None
    if platform == "gpu":
        if (why_not := hopper_why_not("the Hopper grouped matmul")) is not None:
            return PORTABLE, why_not
        from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

        return WhereItCan(GpuGroupedMatmul()), None
    return PORTABLE, None


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """``GroupedMatmul`` in plain XLA. What computes it is chosen when it is lowered, for the target's platform."""
    return lax.platform_dependent(lhs, rhs, group_sizes, cpu=blocked.grouped_matmul, default=_ragged_dot)


def _ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """XLA's own. What it leaves in rows of no group is up to the backend, hence the mask."""
    precision = lax.Precision.HIGHEST if rhs.dtype == jnp.float32 else None
    out = lax.ragged_dot_general(
        lhs, rhs, group_sizes, _OUTPUTS_FIRST, precision=precision, preferred_element_type=lhs.dtype
    )
    live = jnp.arange(lhs.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(live[:, None], out, 0)

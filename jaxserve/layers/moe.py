"""Mixture of experts: a router, experts as two grouped products over sorted tokens, and experts that see every token.

No token is dropped: there is room for all of them going to one expert. Padding tokens go to none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxserve.errors import ConfigError
from jaxserve.layers.expert_parallel import experts_here, local_experts, over_data
from jaxserve.layers.linear import contract, linear
from jaxserve.layers.mlp import GatedMLP, check_ffn_size
from jaxserve.layers.params import LayerContext, StreamNorm
from jaxserve.layers.router import Router, RouterConfig
from pallas_kernels.grouped_matmul.dispatch import FewTokens
from pallas_kernels.grouped_matmul.few import Chosen
from pallas_kernels.grouped_matmul.route import Routed
from sharding import ParamSpec, ShardingRules

ENOUGH_ROWS = 4096
"""Fewer rows are all worked on: those in vain cost less than a branch, for which a GPU asks the host."""
USUAL_IMBALANCE = 2
"""Times the mean that a device's load may be before a step takes the branch that works on all rows."""
GATE_UP_AXES = ("expert", None, "expert_ffn", "embed")
DOWN_AXES = ("expert", "embed", "expert_ffn")
"""Logical axes of experts' matrices, of which the last one is contracted."""


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss' activation: (up + 1) * gate * sigmoid(alpha * gate), gate at most ``limit``, up within it."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MoEConfig:
    """One layer's experts.

    Args:
        router: how tokens find them.
        ffn_size: F of one expert.
        shared_ffn_size: F of the expert that sees every token; None: there is none.
        shared_gate: a sigmoid of the token scales that one's output.
        bias: experts' products have biases.
        clamped: the activation, where it is not silu(gate) * up.
    """

    router: RouterConfig
    ffn_size: int
    shared_ffn_size: int | None = None
    shared_gate: bool = False
    bias: bool = False
    clamped: ClampedSwiGLU | None = None

    def ffn_shards(self, context: LayerContext) -> int:
        """Parts that each expert is split into."""
        return 1 if context.expert_parallel else context.tensor_parallel_size


class Experts(nnx.Module):
    """Weights [E, 2, F, M] (gate, up) and [E, M, F]."""

    def __init__(self, hidden_size: int, config: MoEConfig, context: LayerContext) -> None:
        experts, ffn, shards = config.router.num_experts, config.ffn_size, config.ffn_shards(context)
        if ffn % shards:
            raise ConfigError(
                f"tensor_parallel_size {shards} does not divide the experts' feed-forward size {ffn}.",
                param="tensor_parallel_size",
            )
        experts_here(experts, context)  # refuses sizes that do not fit
        self.gate_up = context.param((experts, 2, ffn, hidden_size), GATE_UP_AXES)
        self.down = context.param((experts, hidden_size, ffn), DOWN_AXES)
        gate_up_bias = context.param((experts, 2, ffn), ("expert", None, "expert_ffn"), scale=0.0)
        down_bias = context.param((experts, hidden_size), ("expert", "embed"), scale=0.0)
        self.gate_up_bias = gate_up_bias if config.bias else None
        self.down_bias = down_bias if config.bias else None
        self.config = config
        self.context = context

    def __call__(self, x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        """What this device's experts (or parts of experts) add to each token.

        Args:
            x: [T, M].
            weights: float32 [T, k].
            experts: int32 [T, k] numbers among this device's experts; out of range: none of them, which is E where
                these are all experts.

        Returns:
            [T, M] in x's type; summed over the devices that share the experts it is the result.
        """
        num_tokens, top_k = experts.shape
        num_experts = self.gate_up[...].shape[0]
        if (few := self.few(num_tokens)) is not None:
            chosen = Chosen.of(weights, experts, num_experts)
            return few(x, self.gate_up[...], self.down[...], chosen).astype(x.dtype)
        if num_experts < self.config.router.num_experts:  # some are other devices'
            experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        sizes = count_tokens(flat, num_experts)
        place = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0]), unique_indices=True)
        scales = jnp.where(experts < num_experts, weights, 0.0)[:, :, None]

        def of_first(num_rows: int) -> jax.Array:
            """The result, if no more sorted rows than these are of this device's experts."""
            first = order[:num_rows]
            rows = self._run(x[first // top_k], jnp.minimum(flat[first], num_experts - 1), sizes)
            # Gathered and added in the order of the choices, not scattered: equal tokens get equal sums in any batch.
            chosen = rows[jnp.minimum(place, num_rows - 1)].reshape(num_tokens, top_k, -1)
            return jnp.sum(chosen.astype(jnp.float32) * scales, axis=1).astype(x.dtype)

        usual = self._usual_rows(order.shape[0])
        if usual == order.shape[0]:
            return of_first(usual)
        return jax.lax.cond(
            jnp.sum(sizes) <= usual, lambda: of_first(usual), lambda: of_first(order.shape[0])
        )

    def run_routed(self, x: jax.Array, routed: Routed) -> jax.Array:
        """``__call__`` with choices whose places among all are known, by experts that are all on this device."""
        places, num_rows = routed.places(), routed.experts.size
        block, _, token = (jax.lax.broadcasted_iota(jnp.int32, places.shape, axis) for axis in range(3))

        def sort(values: jax.Array) -> jax.Array:
            """Values of choices in the order of their places; that of padding is 0."""
            empty = jnp.zeros(num_rows, values.dtype)
            return empty.at[places.reshape(-1)].set(values.reshape(-1), mode="drop", unique_indices=True)

        experts = sort(jnp.minimum(routed.experts, self.config.router.num_experts - 1))
        rows = self._run(x[sort(block * places.shape[2] + token)], experts, routed.sizes())
        # Gathered and added in the order of the choices, not scattered: equal tokens get equal sums in any batch.
        chosen = rows[jnp.minimum(places, num_rows - 1)].astype(jnp.float32)
        return jnp.sum(chosen * routed.weights[..., None], axis=1).astype(x.dtype).reshape(x.shape)

    def few(self, num_tokens: int) -> FewTokens | None:
        """The device's kernels for few tokens, where they can do this."""
        few, weight = self.context.grouped_matmul.few, self.gate_up[...]
        special = self.config.bias or self.config.clamped is not None
        if few is None or special or self.context.batch_invariant:
            return None
        reason = few.why_not(num_tokens, weight.shape[2], weight.shape[3], weight.dtype)
        return few if reason is None else None

    def _usual_rows(self, num_rows: int) -> int:
        """Sorted rows that a device has experts for, but for a very uneven step; all, where that is not worth a branch.

        Under expert parallelism the most are other devices', and what surrounds the products would work on them too.
        """
        context = self.context
        devices = context.data_parallel_size * context.tensor_parallel_size if context.expert_parallel else 1
        if devices < 4 or num_rows < ENOUGH_ROWS:
            return num_rows
        return USUAL_IMBALANCE * num_rows // devices

    def _run(self, x: jax.Array, experts: jax.Array, sizes: jax.Array) -> jax.Array:
        """[N, M] sorted rows, of ``experts`` [N], through theirs. Rows of none give anything finite."""
        down = self.context.grouped_matmul(self._hidden(x, experts, sizes), self.down[...], sizes)
        if self.down_bias is None:
            return down
        # The parts of a split expert are added up, and its bias is to be added once.
        first = self.config.ffn_shards(self.context) == 1 or self.context.shard_index() == 0
        return down + jnp.where(first, self.down_bias[experts], 0)

    def _hidden(self, x: jax.Array, experts: jax.Array, sizes: jax.Array) -> jax.Array:
        """[N, F] of sorted rows: the activation of their experts' gate and up."""
        weight, clamped, multiply = self.gate_up[...], self.config.clamped, self.context.grouped_matmul
        if self.gate_up_bias is None and clamped is None:
            return multiply.gated(x, weight, sizes)
        gate_up = multiply(x, weight.reshape(weight.shape[0], -1, x.shape[1]), sizes)
        halves = gate_up.reshape(x.shape[0], 2, -1).astype(jnp.float32)
        if self.gate_up_bias is not None:
            halves = halves + self.gate_up_bias[experts]
        return _activate(halves[:, 0], halves[:, 1], clamped).astype(x.dtype)


def _activate(gate: jax.Array, up: jax.Array, clamped: ClampedSwiGLU | None) -> jax.Array:
    if clamped is None:
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, clamped.limit)
    up = jnp.clip(up, -clamped.limit, clamped.limit)
    return (up + 1) * gate * jax.nn.sigmoid(clamped.alpha * gate)


def count_tokens(experts: jax.Array, num_experts: int) -> jax.Array:
    """int32 [E]: how often each expert is named; other numbers are nobody."""
    return jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)


def expert_products(
    specs: Iterable[ParamSpec], mesh: Mesh | None, rules: ShardingRules
) -> set[tuple[int, int]]:
    """(outputs, inner) of the experts' matrices on one device: what ``grouped_matmul`` is asked for."""
    products: set[tuple[int, int]] = set()
    for spec in specs:
        if spec.axes in (GATE_UP_AXES, DOWN_AXES):
            sharding = spec.abstract(mesh, rules).sharding
            shape = spec.shape if sharding is None else sharding.shard_shape(spec.shape)
            products.add((math.prod(shape[1:-1]), shape[-1]))
    return products


class MoE(nnx.Module):
    """A layer's feed-forward of experts."""

    def __init__(self, hidden_size: int, config: MoEConfig, context: LayerContext) -> None:
        self.router = Router(hidden_size, config.router, context)
        self.experts = Experts(hidden_size, config, context)
        shared = config.shared_ffn_size
        check_ffn_size(shared or 0, context.tensor_parallel_size)
        self.shared = None if shared is None else GatedMLP(hidden_size, shared, context)
        shared_gate = context.param((1, hidden_size), (None, "embed"))
        self.shared_gate = shared_gate if config.shared_gate else None
        self.config = config
        self.context = context

    def __call__(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Route and run.

        Args:
            x: [T, M].
            live: bool [T]; the others are padding, whose output is finite.

        Returns:
            ([T, M], or this device's tokens of it where tokens are shared; int32 [E] tokens that each expert got of
            this data-parallel rank).
        """
        out, load = self._partial(x, live)
        return self.context.reduce_tokens(out), load

    def onto(
        self, x: jax.Array, live: jax.Array, stream: StreamNorm
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The residual stream with that added, its norms, [T, M], and the tokens that each expert got."""
        out, load = self._partial(x, live)
        return *self.context.add_and_norm(out, stream), load

    def _partial(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """This device's part of the result, and the tokens that each expert got."""
        out, load = self._run_few(x, live) or self._run_routed(x, live) or self._run_any(x, live)
        if self.shared is not None:
            out = out + self._run_shared(x)
        return out, load

    def _run_any(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """This device's part of the experts' results, and their tokens."""
        weights, experts = self.router(x)
        num_experts = self.config.router.num_experts
        experts = jnp.where(live[:, None], experts, num_experts)
        load = count_tokens(experts, num_experts)
        if self.context.expert_parallel:
            return over_data(self._run_local, x, weights, experts, num_experts, self.context), load
        return self.experts(x, weights, experts), load

    def _run_routed(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """The same with a kernel that chooses the experts, where there is one."""
        route, rule = self.context.grouped_matmul.route, self.config.router.plain()
        if route is None or rule is None or self.context.expert_parallel or self.context.batch_invariant:
            return None
        if route.why_not(x.shape[0], self.config.router.num_experts) is not None:
            return None
        routed = route(self.router.logits(x), live, rule)
        return self.experts.run_routed(x, routed), routed.sizes()

    def _run_few(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """The same with kernels that choose the experts of few tokens, where there are such."""
        few, rule = self.experts.few(x.shape[0]), self.config.router.plain()
        if few is None or rule is None or self.context.expert_parallel:
            return None
        if few.why_not_choose(x.shape[0], self.config.router.num_experts) is not None:
            return None
        gate_up, down = self.experts.gate_up[...], self.experts.down[...]
        out, load = few.routed(x, self.router.logits(x), live, rule, gate_up, down)
        return out.astype(x.dtype), load

    def _run_local(self, x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        """``Experts`` with the numbers that experts have in the whole model."""
        return self.experts(x, weights, local_experts(experts, self.config.router.num_experts, self.context))

    def _run_shared(self, x: jax.Array) -> jax.Array:
        """[T, M]: this device's part of the expert that sees every token."""
        assert self.shared is not None
        weight_first = self.context.weight_first
        out = linear(self.shared.activated(x), self.shared.down[...], weight_first=weight_first)
        if self.shared_gate is None:
            return out
        gate = jax.nn.sigmoid(contract(x, self.shared_gate[...], weight_first=weight_first))
        return (out.astype(jnp.float32) * gate).astype(x.dtype)

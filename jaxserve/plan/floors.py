"""Floors: the least time that a step can take, by the bytes it must read and the products it must compute.

They hold for one device, whose peaks are the documented ones: no kernel, no launch, nothing exchanged. Of experts,
those count that tokens are expected to reach when each token's choice is uniform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxserve.plan.planned_runner import PlannedRunner
from jaxserve.runner.kv_arrays import bytes_per_block
from jaxserve.runner.weight_traffic import weight_bytes_read


@dataclass(frozen=True)
class StepFloor:
    """One step's needs on one device.

    Args:
        name: what the step is.
        rows: requests of a rank.
        context: tokens of each, all cached (decode) or all computed (prefill, over as many steps as it takes).
        bytes_read: of weights and cache.
        flops: of products and attention.
        bandwidth_seconds, flop_seconds: these over the device's peaks.
    """

    name: str
    rows: int
    context: int
    bytes_read: float
    flops: float
    bandwidth_seconds: float
    flop_seconds: float

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.bandwidth_seconds, self.flop_seconds)


class Floors:
    """Floors of a planned engine."""

    def __init__(self, runner: PlannedRunner) -> None:
        self.runner = runner
        self.specs = runner.model.specs
        self.ranks = runner.placement.num_ranks
        self.experts_per_token = runner.served.experts_per_token

    def decode(self, rows: int, context: int) -> StepFloor:
        """A step of ``rows`` requests a rank, one token each, that see ``context`` tokens."""
        read = self.weight_bytes_read(rows) + rows * self.cache_bytes(context)
        flops = rows * (self.flops_per_token() + self.head_flops()) + rows * self.attention_flops(context)
        return self._floor("decode", rows, context, read, flops)

    def prefill(self, context: int) -> StepFloor:
        """A prompt of ``context`` tokens, alone on its rank, in steps of the token budget."""
        budget = self.runner.config.scheduler_config.max_num_batched_tokens
        assert budget is not None
        steps = math.ceil(context / budget)
        read = steps * self.weight_bytes_read(min(context, budget))
        flops = context * self.flops_per_token() + steps * self.head_flops()
        flops += self.attention_flops(context) * context / 2
        return self._floor("prefill", 1, context, read, flops)

    def _floor(self, name: str, rows: int, context: int, read: float, flops: float) -> StepFloor:
        topology = self.runner.topology
        return StepFloor(
            name,
            rows,
            context,
            read,
            flops,
            read / topology.hbm_bytes_per_second,
            flops / topology.bf16_flops,
        )

    def weight_bytes_read(self, num_tokens: int) -> float:
        """Bytes of weights that one device reads in a step of ``num_tokens`` a rank: the embedding's rows aside."""
        return weight_bytes_read(self.runner.model, self.runner.mesh, num_tokens, self.experts_per_token)

    def flops_per_token(self) -> float:
        """Of the layers' products on one device, for one token of its rank; attention and logits aside."""
        total = 0.0
        for spec in self.specs.values():
            if len(spec.shape) < 2 or "layers" in spec.axes or "vocab" in spec.axes:
                continue
            used = 1.0
            if "expert" in spec.axes:
                used = self.experts_per_token / spec.shape[spec.axes.index("expert")]
                used *= self.ranks if self.runner.model.context.expert_parallel else 1
            total += 2.0 * used * math.prod(self.runner.device_shape(spec))
        return total

    def head_flops(self) -> float:
        """Of one row's logits."""
        head = self.specs.get("lm_head", self.specs["embedding"])
        return 2.0 * math.prod(self.runner.device_shape(head))

    def cache_bytes(self, context: int) -> float:
        """Bytes of cache that one token reads when it sees ``context`` tokens (windows of layers counted)."""
        served = self.runner.served
        size = served.block_size
        return sum(
            bytes_per_block([spec], size, served.backend)
            / size
            * min(context, spec.sliding_window or context)
            for spec in served.specs
        )

    def attention_flops(self, context: int) -> float:
        """Of one token's attention over ``context`` tokens: scores, then the sum of values."""
        model = self.runner.model
        heads = model.num_heads / model.context.tensor_parallel_size
        return sum(
            2.0 * heads * (spec.head_size + spec.value_size) * min(context, spec.sliding_window or context)
            for spec in self.runner.specs
        )

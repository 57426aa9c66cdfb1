"""Which tokens' experts are few on Hopper, and with what configurations: ``dispatch.FewTokens`` on Hopper.

``gpu_few_mlp`` computes them, and says the ideas behind it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import gpu_choose
from pallas_kernels.grouped_matmul.few import Chosen, Rule
from pallas_kernels.grouped_matmul.gpu_few_mlp import gated_mlp
from pallas_kernels.grouped_matmul.gpu_few_tuning import ROWS, FewConfig, table
from pallas_kernels.hopper import multiprocessors

DTYPES = ("bfloat16", "float16")
MOST_TOKENS = 256
"""That one instruction has columns for."""


@dataclass(frozen=True)
class GpuFewTokens:
    """Both kernels; see ``dispatch.FewTokens``. Static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        configs: of the two kernels or the one that is both, instead of the tuning table's; then any number of tokens
            that fits is taken.
        interpret: ``plgpu.InterpretGPUParams`` runs them on a CPU.
    """

    num_sms: int | None = None
    configs: tuple[FewConfig, FewConfig] | FewConfig | None = None
    interpret: Any = None

    def why_not(self, num_tokens: int, ffn_size: int, hidden_size: int, dtype: Any) -> str | None:
        """See ``FewTokens``; the tuning table decides."""
        name = jnp.dtype(dtype).name
        if name not in DTYPES:
            return f"the Hopper kernels for few tokens take {' or '.join(DTYPES)}, not {name}"
        if ffn_size % ROWS or hidden_size % ROWS:
            return f"the Hopper kernels take experts of multiples of {ROWS}, not {ffn_size} x {hidden_size}"
        most = MOST_TOKENS if self.configs is not None else table()[-1][0]
        return f"{num_tokens} tokens are not few: more than {most}" if num_tokens > most else None

    def why_not_choose(self, num_tokens: int, num_experts: int) -> str | None:
        """See ``FewTokens``."""
        return gpu_choose.supported(num_tokens, num_experts)

    def routed(
        self,
        x: jax.Array,
        logits: jax.Array,
        live: jax.Array,
        rule: Rule,
        gate_up: jax.Array,
        down: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """See ``FewTokens``; in three kernels."""
        chosen, load, rows = gpu_choose.choose(logits, live, x, rule, interpret=self.interpret)
        return self(rows, gate_up, down, chosen)[: x.shape[0]], load

    def __call__(self, x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: Chosen) -> jax.Array:
        """See ``FewTokens``. ValueError: what ``why_not`` says, or operands of several types."""
        num_tokens, ffn_size = x.shape[0], gate_up.shape[2]
        if not x.dtype == gate_up.dtype == down.dtype:
            raise ValueError(
                f"tokens and matrices are of one type, not {x.dtype}, {gate_up.dtype} and {down.dtype}"
            )
        if (reason := self.why_not(num_tokens, ffn_size, x.shape[1], x.dtype)) is not None:
            raise ValueError(reason)
        configs = self.configs or next(each for most, each in table() if num_tokens <= most)
        num_sms = multiprocessors(self.num_sms)
        return _jitted(x, gate_up, down, chosen, configs, num_sms, self.interpret)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _jitted(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    chosen: Chosen,
    configs: Any,
    num_sms: int,
    interpret: Any,
) -> jax.Array:
    """Traced once for all layers of a step."""
    return gated_mlp(x, gate_up, down, chosen, configs=configs, num_sms=num_sms, interpret=interpret)

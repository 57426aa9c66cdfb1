"""CacheSizer: how many blocks an engine's cache has, and how long its requests may be, by what memory is left for it.

The cache's size is part of the programs, and their temporaries limit the cache: so these are estimated, or measured
with a cache as large as if programs needed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxserve.config import EngineConfig
from jaxserve.errors import OutOfMemoryError
from jaxserve.runner.engine_programs import EnginePrograms
from jaxserve.runner.kv_arrays import MemoryBudget, choose_num_blocks
from jaxserve.runner.programs import StepPrograms
from jaxserve.runner.temporaries import forward_temporaries, sampler_temporaries
from jaxserve.runner.weight_traffic import weight_bytes
from jaxserve.sampling.state import state_bytes
from sharding.distributed import smallest

KERNEL_SCRATCH = 64 << 20
"""Bytes that attention kernels keep unfinished rows in."""
LOGIT_COPIES = 4
"""float32 copies of a step's logits that the whole sampler keeps, by the GPU compiler's account: 3.1."""
BESIDE_WEIGHTS = 16 << 20
"""Bytes for what an allocator adds to arrays and loading leaves behind."""


@dataclass(frozen=True)
class CacheSize:
    """Of a cache that is not there yet.

    Args:
        num_blocks: blocks of a rank, the dummy included.
        max_model_len: tokens of the longest request.
        temporaries: bytes that programs may need beside their arguments; 0 where it does not matter.
        trial: in whose store it is noted if they need more; None where it does not matter.
    """

    num_blocks: int
    max_model_len: int
    temporaries: int = 0
    trial: StepPrograms | None = None


class CacheSizer:
    """Sizes one engine's cache.

    Args:
        config: with the platform's defaults filled in.
        programs: what the cache shares the memory with.
        budget: from bytes of program temporaries to the memory of the fullest device; None where devices do not tell.
    """

    def __init__(
        self, config: EngineConfig, programs: EnginePrograms, budget: Callable[[int], MemoryBudget | None]
    ) -> None:
        self._config, self._programs, self._budget = config, programs, budget

    @property
    def is_given(self) -> bool:
        """The user said how large the cache is: it depends on no program."""
        cache = self._config.cache_config
        return cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None

    def choose(self, *, before_weights: bool = False) -> CacheSize:
        """The size for what programs are known, estimated or measured to need.

        Args:
            before_weights: they are not loaded yet, and what they will take is subtracted.

        Raises:
            OutOfMemoryError: one request does not fit.
        """
        coming = self._weights_to_come() if before_weights else 0
        size = self.fit(0, coming)
        if self.is_given:
            return size
        trial = self._programs.for_cache(size.num_blocks, size.max_model_len)
        temporaries = trial.temporaries(self.estimated_temporaries())
        return replace(self.fit(temporaries, coming), trial=trial)

    def fit(self, temporaries: int, coming: int = 0) -> CacheSize:
        """The size for the given program temporaries.

        Args:
            temporaries: bytes.
            coming: bytes of weights that are not loaded yet.

        Raises:
            OutOfMemoryError: one request does not fit.
        """
        served = self._programs.served
        asked, longest = self._config.model_config.max_model_len, served.model.max_position_embeddings
        wanted = asked if isinstance(asked, int) else None if asked == "auto" else longest
        budget = self._budget(temporaries)
        if budget is not None:
            budget = replace(budget, in_use=budget.in_use + coming + self._state_bytes())
        # Devices of other hosts may have less memory.
        num_blocks = smallest(
            choose_num_blocks(
                self._config.cache_config, budget, served.block_bytes, served.block_size, wanted
            )
        )
        if wanted is None:
            wanted = min(longest, (num_blocks - 1) * served.block_size)
            if wanted < 2:
                raise OutOfMemoryError("No block of KV cache fits. Give the cache more memory.")
        return CacheSize(num_blocks, wanted, temporaries)

    def estimated_temporaries(self) -> int | None:
        """Bytes by which the cache is sized before programs are compiled; None where they are measured."""
        if not self._programs.style.fixed_addresses:
            return None
        bucket, mesh = self._programs.builder.table.buckets[-1], self._programs.placement.mesh
        served = self._programs.served
        return KERNEL_SCRATCH + max(
            forward_temporaries(served.model, bucket.num_tokens, served.experts_per_token, mesh),
            sampler_temporaries(served.model, bucket.num_rows, LOGIT_COPIES, mesh),
        )

    def _weights_to_come(self) -> int:
        """Bytes that the weights will take of a device."""
        return weight_bytes(self._programs.served.model, self._programs.placement.mesh) + BESIDE_WEIGHTS

    def _state_bytes(self) -> int:
        """Bytes of what lives on a device beside weights and cache."""
        model, builder = self._programs.served.model, self._programs.builder
        state = state_bytes(builder.max_num_seqs, model.vocab_size)
        if self._programs.style.fixed_addresses:  # hidden states (``StepBuffers``)
            largest = builder.table.buckets[-1]
            kept = largest.num_tokens + largest.num_rows
            state += kept * model.hidden_size * model.dtype.itemsize
        return state

"""JaxModelRunner: the device side. Holds weights, caches and programs; turns a SchedulerOutput into one dispatch."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, OutOfMemoryError
from jaxserve.layers.moe import expert_products
from jaxserve.layers.params import TENSOR_AXIS
from jaxserve.models import Model, build
from jaxserve.models.functional import PEERS, PEERS_SPEC
from jaxserve.runner.batch_builder import BatchBuilder, StepBatch, split_by_rank
from jaxserve.runner.buckets import BucketTable
from jaxserve.runner.bursts import choose_bursts
from jaxserve.runner.compilation import CompilationCounter, program_folder
from jaxserve.runner.input_batch import InputBatch
from jaxserve.runner.invariance import Invariance
from jaxserve.runner.kv_arrays import (
    MemoryBudget,
    bytes_per_block,
    choose_num_blocks,
    device_budget,
    single_group,
)
from jaxserve.runner.kv_arrays import device_memory as memory_of
from jaxserve.runner.pending_step import DispatchedStep
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.programs import (
    FEWEST_LOGITS,
    LIBRARY_PRODUCTS,
    UNTUNED,
    HeadVariant,
    ProgramShapes,
    ProgramStyle,
    StepPrograms,
    StepVariant,
    burst_variants,
    step_variants,
)
from jaxserve.runner.prompt_scoring import PromptScorer
from jaxserve.runner.state_updates import StateUpdates
from jaxserve.runner.step_layout import head_size
from jaxserve.runner.temporaries import forward_temporaries, sampler_temporaries
from jaxserve.runner.token_masks import changed_masks
from jaxserve.runner.weight_traffic import weight_bytes, weight_bytes_read
from jaxserve.sampling.metadata import Feature
from jaxserve.sampling.state import state_bytes
from jaxserve.step import BurstLimits, RunnerInfo, SchedulerOutput
from jaxserve.weights.loader import load_params
from jaxserve.weights.resolve import ModelFiles, resolve_model
from pallas_kernels.all_reduce.dispatch import AllReduce, all_reduce_of
from pallas_kernels.all_reduce.workspace import Workspaces, workspaces_or_why
from pallas_kernels.dense_matmul.dispatch import DenseMatmul, dense_matmul_of
from pallas_kernels.dispatch import AttentionBackend, AttentionSizes, BlockedBackend, attention_backend
from pallas_kernels.grouped_matmul.dispatch import GroupedMatmul, grouped_matmul_of
from pallas_kernels.kv_cache_update.quantized import FLOAT8
from pallas_kernels.mla_attention.dispatch import LatentBackend, latent_backend
from pallas_kernels.rms_norm.dispatch import add_norm_of
from pallas_kernels.split_heads.dispatch import split_heads_of
from sharding import make_mesh
from sharding.distributed import smallest

logger = logging.getLogger(__name__)

KERNEL_SCRATCH = 64 << 20
"""Bytes that attention kernels keep unfinished rows in."""
LOGIT_COPIES = 4
"""float32 copies of a step's logits that the whole sampler keeps, by the GPU compiler's account: 3.1."""
LOGPROBS = int(Feature.LOGPROBS)
WEIGHT_FORMATS = {"hf": "safetensors"}
"""``ModelFiles.format`` in the words of ``load_format``, where they differ."""


BESIDE_WEIGHTS = 16 << 20
"""Bytes for what an allocator adds to arrays and loading leaves behind."""
LOST_TO_ESTIMATE = 0.05
"""Of a cache's blocks, how many may be missing because the weights' size was estimated: ``COARSE_BLOCKS`` of a large
one, a few of a small one."""


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
    temporaries: int
    trial: StepPrograms | None


@dataclass(frozen=True)
class EarlyPrograms:
    """Programs that are lowered while the weights are loaded, for a cache of the size that those will leave."""

    size: CacheSize
    programs: StepPrograms


def platform_name() -> str:
    """``cpu``, ``gpu`` or ``tpu``: what this process's devices are."""
    return jax.default_backend()


def device_memory() -> int | None:
    """Bytes of one of this process's devices, None if it does not tell; of several processes the least."""
    return smallest(memory_of(jax.local_devices()[0]) or 0) or None


def cache_type(name: str) -> Any:
    """The element type that ``kv_cache_dtype`` names: vLLM's fp8 is e4m3."""
    return FLOAT8 if name in ("fp8", "fp8_e4m3") else jnp.dtype(name)


class JaxModelRunner:
    """One model on this program's devices. One thread calls everything.

    With data parallelism each rank has an ``InputBatch`` of its own; all of them share a step's bucket and program.

    Args:
        config: with the platform's defaults filled in (``EngineConfig.with_defaults_for``).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.platform = platform_name()
        self.counter = CompilationCounter()
        self.backend: AttentionBackend | LatentBackend
        self.why_no_kernels: str | None = None
        self.startup_seconds: dict[str, float] = {}
        self._workspaces: Workspaces | None = None
        self._early: EarlyPrograms | None = None

    # --- start ----------------------------------------------------------------------------------------------

    def initialize(self) -> RunnerInfo:
        """Load, size, compile, warm up.

        Raises:
            ConfigError, CheckpointError, ModelNotFoundError: saying what is wrong with what the user asked for.
        """
        config = self.config
        self.placement = self._place()
        self._program_folder = program_folder(config.compilation_config.compile_cache_dir)
        self.files = resolve_model(
            config.model_config.model,
            config.model_config.revision,
            weights=config.model_config.load_format != "dummy",
        )
        self._choose_model({**self.files.config, **config.model_config.hf_overrides})
        self._make_builder()
        try:
            self._lower_early()
            self._load_weights(self.files)
            self._size_and_compile()
        finally:
            if self._early is not None:
                self._early.programs.abandon()
            self._early = None
        self._warm_up()
        self.counter.start()
        return self.info

    @property
    def invariance(self) -> Invariance:
        """What is done so that outputs depend on their requests alone."""
        return Invariance(self.config.compilation_config.batch_invariant, self.platform)

    def _check_invariance(self, model: Model) -> None:
        """Refuse ``batch_invariant`` where it would be asked for in vain."""
        if not self.invariance.enabled:
            return
        devices = self.config.parallel_config.num_devices
        if (
            why_not := self.invariance.why_not(model, self.backend, self.why_no_kernels, devices)
        ) is not None:
            raise ConfigError(why_not, param="batch_invariant")
        if self.config.scheduler_config.max_num_batched_tokens == 1:
            raise ConfigError(
                "batch_invariant needs steps of at least 2 tokens; raise max_num_batched_tokens from 1.",
                param="max_num_batched_tokens",
            )

    def _place(self) -> Placement:
        """The devices that the user asked for."""
        parallel = self.config.parallel_config
        tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
        devices = self._available_devices()
        available = len(devices)
        if parallel.num_devices > available:
            fitting = [f"-tp {t} -dp {available // t}" for t in range(1, available + 1) if available % t == 0]
            raise ConfigError(
                f"tensor_parallel_size {tensor} x data_parallel_size {data} needs {parallel.num_devices} devices, but "
                f"there are {available}. All of them are used by: {', '.join(fitting)}.",
                param="tensor_parallel_size" if data == 1 else "data_parallel_size",
            )
        placement = self._make_placement(devices)
        if jax.process_count() == 1:
            return placement
        idle = {device.process_index for device in devices} - {d.process_index for d in placement.devices}
        if idle:
            raise ConfigError(
                f"tensor_parallel_size {tensor} x data_parallel_size {data} leaves hosts {sorted(idle)} without work: "
                f"the {jax.process_count()} hosts have {available} devices. Leave idle hosts out of --nnodes.",
                param="tensor_parallel_size",
            )
        return placement

    def _available_devices(self) -> list[Any]:
        return jax.devices()

    def _make_placement(self, devices: list[Any]) -> Placement:
        parallel, options = self.config.parallel_config, self.invariance.compiler_options
        if parallel.num_devices == 1:
            return Placement(compiler_options=options)
        tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
        return Placement(make_mesh(tensor, devices, data_parallel_size=data), options)

    def _choose_model(self, hf_config: dict[str, Any]) -> None:
        """The model and the types it computes in; no array is made."""
        cache = self.config.cache_config
        self._hf_config = hf_config
        self.dtype = self._compute_dtype(hf_config)
        self.cache_dtype = self.dtype if cache.kv_cache_dtype == "auto" else cache_type(cache.kv_cache_dtype)
        assert cache.block_size is not None
        self.block_size = cache.block_size
        self.model: Model = self._build_model(hf_config)
        asked, longest = self.config.model_config.max_model_len, self.model.max_position_embeddings
        if isinstance(asked, int) and asked > longest:
            raise ConfigError(
                f"max_model_len is {asked}, but the model was made for {longest} tokens. Lower it.",
                param="max_model_len",
            )

    def _compute_dtype(self, hf_config: dict[str, Any]) -> Any:
        name = self.config.model_config.dtype
        if name == "auto":
            if self.platform == "cpu":
                return jnp.dtype("float32")  # XLA's bfloat16 products are several times slower on CPUs
            name = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
        return jnp.dtype(name)

    def _build_model(self, hf_config: dict[str, Any]) -> Model:
        """The model on the best attention backend that can serve it; which one that is depends on its heads."""
        parallel = self.config.parallel_config
        devices = parallel.tensor_parallel_size
        make = partial(
            build, hf_config, dtype=self.dtype, kv_cache_dtype=self.cache_dtype, tensor_parallel_size=devices,
            data_parallel_size=parallel.data_parallel_size, expert_parallel=parallel.enable_expert_parallel,
            sequence_parallel=parallel.sequence_parallel, ragged_exchange=self.platform != "cpu",
            latent_backend=latent_backend(self.platform)[0], grouped_matmul=self._grouped_matmul()[0],
            dense_matmul=self.invariance.dense_matmul(self._dense_matmul()), peer_all_reduce=self._peer_all_reduce(),
            split_heads=None if self.invariance.enabled else split_heads_of(self.platform),
            add_norm=None if self.invariance.enabled else add_norm_of(self.platform),
        )  # fmt: skip
        # Weights come first for few tokens only, and so would change the order of summation with their number.
        invariant = self.invariance.enabled
        first = self.platform == "cpu" and not invariant
        make = partial(make, batch_invariant=invariant)
        blocked = BlockedBackend(fixed_order=invariant)
        portable = make(blocked, weight_first=first, rms_norm=self.invariance.rms_norm(blocked))
        self._tell_of_experts(portable)
        self.specs = [spec.on_one_of(devices) for spec in portable.kv_cache_specs(self.cache_dtype.name)]
        if portable.has_latents:
            self.backend, self.why_no_kernels = latent_backend(self.platform)
            self._check_invariance(portable)
            if self.why_no_kernels is not None:
                logger.warning("Attention takes the portable path, which is slower: %s.", self.why_no_kernels)
            return portable
        sizes = AttentionSizes(
            num_heads=portable.num_heads // devices,
            num_kv_heads=self.specs[0].num_kv_heads,
            head_size=self.specs[0].head_size,
            block_size=self.block_size,
            dtype=self.dtype,
            kv_dtype=self.cache_dtype,
        )
        backend, why_not = self._attention_backend(sizes, portable)
        self.backend, self.why_no_kernels = backend, why_not
        self._check_invariance(portable)
        if why_not is not None:
            self._refuse_cache_type(replace(sizes, kv_dtype=self.dtype), portable, why_not)
            logger.warning("Attention takes the portable path, which is slower: %s", why_not)
        if isinstance(backend, BlockedBackend):
            return portable
        return make(backend, rms_norm=self.invariance.rms_norm(backend))

    def _attention_backend(self, sizes: AttentionSizes, model: Model) -> tuple[AttentionBackend, str | None]:
        """What this process's devices offer: see ``attention_backend``."""
        return attention_backend(self.platform, sizes, model.attention_options)

    def _grouped_matmul(self) -> tuple[GroupedMatmul, str | None]:
        """What this process's devices offer for experts: see ``grouped_matmul_of``."""
        return grouped_matmul_of(self.platform)

    def _dense_matmul(self) -> DenseMatmul | None:
        """What this process's devices offer for the other products: see ``dense_matmul_of``."""
        return dense_matmul_of(self.platform)[0]

    def _peer_all_reduce(self) -> AllReduce | None:
        """What this process's devices offer for few tokens: see ``all_reduce_of``.

        The memory through which they add up is made at once, since only then it is known that they can reach it.
        """
        mesh = self.placement.mesh
        if self.platform != "gpu" or mesh is None or mesh.shape[TENSOR_AXIS] == 1:
            return None
        groups = mesh.devices.tolist()
        kernel, why_not = all_reduce_of(groups)
        if kernel is not None:
            self._workspaces, why_not = workspaces_or_why(groups, kernel.capacity)
        if why_not is not None:
            logger.warning("All-reduces of few tokens take NCCL, which is slower: %s", why_not)
        return kernel if why_not is None else None

    def _tell_of_experts(self, model: Model) -> None:
        """Log which products of experts are left to the portable path, and why."""
        products = expert_products(model.specs.values(), self.placement.mesh, model.context.rules)
        if not products:
            return
        kernel, why_not = self._grouped_matmul()
        reasons = {kernel.why_not(*product, self.dtype) for product in products} | {why_not}
        for reason in sorted(filter(None, reasons)):
            logger.warning("Experts take the portable path, which is slower: %s", reason)

    def _refuse_cache_type(self, sizes: AttentionSizes, model: Model, why_not: str) -> None:
        """Refuse a cache type which alone keeps the model off its device's kernels: it would be silently slow.

        Args:
            sizes: as they would be with the default type.
            model: what asks.
            why_not: the reason.
        """
        asked = self.config.cache_config.kv_cache_dtype
        if asked != "auto" and self._attention_backend(sizes, model)[1] is None:
            raise ConfigError(
                f"kv_cache_dtype is {asked!r}, and {why_not} The default, 'auto', has kernels here.",
                param="kv_cache_dtype",
            )

    def _load_weights(self, files: ModelFiles) -> None:
        started = time.monotonic()
        model = self.config.model_config
        size = self.model.param_bytes() / (1 << 20)
        if model.load_format == "dummy":
            logger.info("Making %.0f MiB of random weights", size)
            from jaxserve.weights.dummy import dummy_params

            mesh, rules = self.placement.mesh, self.model.context.rules
            self.params = dummy_params(self.model.specs, seed=model.seed, mesh=mesh, rules=rules)
        else:
            if model.load_format not in ("auto", WEIGHT_FORMATS.get(files.format, files.format)):
                raise ConfigError(
                    f"load_format is {model.load_format!r}, but {files.path} holds {files.format} weights.",
                    param="load_format",
                )
            logger.info("Loading %s (%.0f MiB as %s)", files.path.name, size, self.dtype.name)
            mesh, rules = self.placement.mesh, self.model.context.rules
            self.params = load_params(self.model.specs, self.model.weight_map, files, mesh=mesh, rules=rules)
        self._meet_peers()
        jax.block_until_ready(self.params)
        self._note("weights", started)

    def _meet_peers(self) -> None:
        """Tell programs where the memory lies through which tensor-parallel devices add up."""
        if self._workspaces is not None:
            self.params[PEERS] = self.placement.put(self._workspaces.peers, PEERS_SPEC)

    def _note(self, phase: str, started: float) -> None:
        seconds = time.monotonic() - started
        self.startup_seconds[phase] = round(seconds, 3)
        logger.info("%s: %.1f s", phase.capitalize(), seconds)

    def _make_builder(self) -> None:
        """The bucket table of this platform, and the batch builder over it."""
        scheduler = self.config.scheduler_config
        assert scheduler.max_num_seqs is not None
        assert scheduler.max_num_batched_tokens is not None
        self.max_num_seqs = scheduler.max_num_seqs
        self._style = ProgramStyle.of(self.platform)
        self.builder = BatchBuilder(
            BucketTable.build(
                scheduler.max_num_batched_tokens,
                self.max_num_seqs,
                decode_programs=self._style.decode_programs,
                fine=self._style.fixed_addresses,
                trimmed=scheduler.enable_chunked_prefill and self.placement.num_ranks == 1,
                fewest_rows=self.invariance.fewest_rows,
            ),
            self.block_size,
            self.max_num_seqs,
            self._bursts(),
        )

    def _bursts(self) -> BurstLimits | None:
        """The bursts that pay here: see ``choose_bursts``."""
        read = partial(weight_bytes_read, self.model, self.placement.mesh)
        return choose_bursts(
            self.config,
            platform=self.platform,
            block_size=self.block_size,
            bytes_read=lambda num_rows: read(num_rows, self._experts_per_token),
        )

    @property
    def _experts_per_token(self) -> int:
        return int(self._hf_config.get("num_experts_per_tok") or 1)

    def _lower_early(self) -> None:
        """Begin to lower the programs, which no weights are needed for but to know how large the cache will be.

        Not where only the weights, or a compilation, tell. Nothing is compiled before they are loaded: compilers try
        things out on the device, and between the weights that would leave holes.
        """
        cache = self.config.cache_config
        given = cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None
        if jax.process_count() > 1 or not (given or self._style.fixed_addresses):
            return
        coming = weight_bytes(self.model, self.placement.mesh) + BESIDE_WEIGHTS
        try:
            size = self._cache_size(coming)
        except OutOfMemoryError:  # said once it is certain
            return
        self._early = EarlyPrograms(size, self._programs(size.num_blocks))
        self._early.programs.lower(self._tell_progress)

    def _cache_size(self, coming: int = 0) -> CacheSize:
        """The cache's size is part of the programs, and their temporaries limit the cache: so these are estimated, or
        measured with a cache as large as if programs needed nothing.

        Args:
            coming: bytes of weights that are not loaded yet.
        """
        cache = self.config.cache_config
        num_blocks, temporaries, trial = self._num_blocks(0, coming), 0, None
        if cache.num_gpu_blocks_override is None and cache.kv_cache_memory_bytes is None:
            trial = self._programs(num_blocks)
            temporaries = trial.temporaries(self.estimated_temporaries())
            num_blocks = self._num_blocks(temporaries, coming)
        return CacheSize(num_blocks, self.max_model_len, temporaries, trial)

    def _size_and_compile(self) -> None:
        """Choose the cache's size, now that the weights are there, and compile for it."""
        started = time.monotonic()
        size, programs = self._early_or_now()
        self.max_model_len = size.max_model_len
        self._compile(size.num_blocks, programs)
        if size.trial is not None and self._style.fixed_addresses:
            needed = self.programs.lacking(size.temporaries)
            if needed is not None:
                logger.warning(
                    "Programs need %d MiB more than was estimated.", (needed - size.temporaries) / (1 << 20)
                )
                size.trial.store.note(size.trial.key(size.trial.largest), needed)
                if (num_blocks := self._num_blocks(needed)) < self.num_blocks:
                    self._compile(num_blocks, self._programs(num_blocks))
                else:  # fewer were made room for than there is
                    self.max_model_len = size.max_model_len
        self._note("compilation", started)

    def _early_or_now(self) -> tuple[CacheSize, StepPrograms]:
        """The size of the programs that are being lowered, if it is as good as what is now known; or else that."""
        early = self._early
        if early is not None:
            measured = self._num_blocks(early.size.temporaries)
            if 0 <= measured - early.size.num_blocks <= measured * LOST_TO_ESTIMATE:
                return early.size, early.programs
            early.programs.abandon()
            logger.info(
                "Weights leave room for %d blocks, not for %d: programs are made anew.", measured, early.size.num_blocks
            )  # fmt: skip
        size = self._cache_size()
        return size, self._programs(size.num_blocks)

    def estimated_temporaries(self) -> int | None:
        """Bytes by which the cache is sized before programs are compiled; None where they are measured."""
        if not self._style.fixed_addresses:
            return None
        bucket, mesh = self.builder.table.buckets[-1], self.placement.mesh
        return KERNEL_SCRATCH + max(
            forward_temporaries(self.model, bucket.num_tokens, self._experts_per_token, mesh),
            sampler_temporaries(self.model, bucket.num_rows, LOGIT_COPIES, mesh),
        )

    def _compile(self, num_blocks: int, programs: StepPrograms) -> None:
        """Get every program ready, for a cache of this size."""
        self.programs = programs
        self.num_blocks = num_blocks
        programs.compile(self._tell_progress)
        self.num_programs = len(programs.compiled)
        if programs.store.hits:
            logger.info(
                "%d of %d programs were stored by an earlier start", programs.store.hits, self.num_programs
            )

    @staticmethod
    def _tell_progress(done: int, total: int) -> None:
        if done == total or done % 4 == 0:
            logger.info("Compiled %d of %d programs", done, total)

    def _num_blocks(self, temporaries: int, coming: int = 0) -> int:
        """Blocks for the given program temporaries; also settles ``max_model_len``.

        Args:
            coming: bytes of weights that are not loaded yet.
        """
        cache = self.config.cache_config
        asked, longest = self.config.model_config.max_model_len, self.model.max_position_embeddings
        wanted = None if asked == "auto" else (asked or longest)
        budget = self._device_budget(temporaries)
        if budget is not None:
            state = state_bytes(self.max_num_seqs, self.model.vocab_size)
            if self._style.fixed_addresses:  # hidden states (``StepBuffers``)
                largest = self.builder.table.buckets[-1]
                kept = largest.num_tokens + largest.num_rows
                state += kept * self.model.hidden_size * self.model.dtype.itemsize
            budget = replace(budget, in_use=budget.in_use + coming + state)
        block_bytes = bytes_per_block(self.specs, self.block_size, self.backend)
        # Devices of other hosts may have less memory.
        num_blocks = smallest(choose_num_blocks(cache, budget, block_bytes, self.block_size, wanted))
        if wanted is None:
            wanted = min(longest, (num_blocks - 1) * self.block_size)
            if wanted < 2:
                raise OutOfMemoryError("No block of KV cache fits. Give the cache more memory.")
        self.max_model_len = wanted
        return num_blocks

    def _device_budget(self, temporaries: int) -> MemoryBudget | None:
        """Memory of the fullest device; None where devices do not tell."""
        share = self.config.cache_config.gpu_memory_utilization
        return device_budget(self.placement.local_devices, share, temporaries)

    def _programs(self, num_blocks: int) -> StepPrograms:
        vocab = self.model.vocab_size
        max_logprobs = self.config.model_config.max_logprobs
        shapes = ProgramShapes(
            max_num_seqs=self.max_num_seqs,
            vocab_size=vocab,
            max_logprobs=vocab if max_logprobs < 0 else min(max_logprobs, vocab),
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_blocks_per_row=-(-self.max_model_len // self.block_size),
            kv_cache_shapes=tuple(
                self.backend.kv_cache_shape(num_blocks, self.block_size, spec.num_kv_heads, spec.head_size)
                for spec in self.specs
            ),
            kv_cache_dtype=self.cache_dtype,
            num_ranks=self.placement.num_ranks,
            block_axis=self.backend.block_axis(),
            split_kv_heads=not self.model.has_latents,
            has_experts=self.model.has_experts,
        )
        variants, bursts = (
            step_variants(self.builder.table, self._style),
            burst_variants(self.builder, self._style),
        )
        if self._style.fixed_addresses:
            shapes = replace(
                shapes,
                fixed_input=max(
                    head_size(FEWEST_LOGITS),
                    *(layout.size for layout in self.builder.layouts.values()),
                    *(layout.size for layout in self.builder.burst_layouts.values()),
                ),
                fixed_tokens=self.builder.table.mixed[-1].num_tokens,
                fixed_rows=max(FEWEST_LOGITS, *(bucket.num_rows for bucket in self.builder.table.buckets)),
                fixed_burst=max((burst.num_steps * burst.bucket.num_rows for burst in bursts), default=0),
                hidden_size=self.model.hidden_size,
                dtype=self.model.dtype,
            )
        return StepPrograms(
            self.model, self.builder, shapes, variants, self._program_store(), self.placement,
            *((LIBRARY_PRODUCTS, UNTUNED) if self.platform == "gpu" else ((), ())), bursts,
        )  # fmt: skip

    def _program_store(self) -> ProgramStore:
        """What is on disk of programs for this model on these devices; nothing for several processes, which must all
        compile the same ones."""
        folder = self._program_folder if jax.process_count() == 1 else None
        return ProgramStore(folder, self._program_description(), self.placement.devices)

    def _program_description(self) -> str:
        """All of this engine that its programs depend on beside their shapes."""
        return repr((
            self._hf_config, self.dtype, self.platform, self.backend.name, sorted(self.model.specs.items()),
            sorted(map(repr, self.model.attention_options)), self.config.parallel_config,
            self.invariance, self.model.context.peer_all_reduce,
        ))  # fmt: skip

    def _warm_up(self) -> None:
        """Allocate the state and run every program on padding, with the arguments of serving."""
        started = time.monotonic()
        compiled, ranks = self.programs.compiled, self.placement.num_ranks
        self._updates = StateUpdates(self.placement, compiled, self.max_num_seqs, self.model.vocab_size)
        self._scorer = PromptScorer(self.placement, compiled, self.params)
        self.state = self.placement.zeros(self.programs.state)
        heads, smallest_step = self.programs.heads or [None], self.programs.variants[-1]
        for _ in range(self._style.warm_up_runs):
            for variant, head in zip_longest(self.programs.variants, heads, fillvalue=None):
                hidden = self._warm_up_step(variant or smallest_step, head or heads[-1])
                scored = self._scorer.warm_up(hidden)
            for burst in self.programs.bursts:
                buffer = self.placement.put_all([self.builder.padding(burst.bucket, burst=True)])
                _, self.state = self.programs.run_burst(burst, self.params, self.state, buffer)
        self.state = self._updates.warm_up(self.state)
        jax.block_until_ready((scored, self.state))
        self._empty_batches()
        self._note("warm-up", started)
        tokens = ranks * (self.num_blocks - 1) * self.block_size
        block_bytes = bytes_per_block(self.specs, self.block_size, self.backend)
        cache_bytes = len(self.placement.devices) * self.num_blocks * block_bytes
        logger.info(
            "KV cache: %s tokens in %d blocks of %d (%.0f MiB), %.1f requests of %s tokens",
            f"{tokens:,}", ranks * (self.num_blocks - 1), self.block_size, cache_bytes / (1 << 20),
            tokens / self.max_model_len, f"{self.max_model_len:,}",
        )  # fmt: skip
        self.info = RunnerInfo(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.model.vocab_size,
            kv_cache_groups=[single_group(self.specs)],
            kv_cache_bytes=cache_bytes,
            num_programs=self.num_programs,
            device=self._device_name(),
            data_parallel_size=ranks,
            separate_paths=self.invariance.separate_paths(self.backend),
            bursts=self.builder.bursts,
            step_sizes=self.builder.table.costly_sizes,
        )

    def _device_name(self) -> str:
        name = f"{jax.local_devices()[0].device_kind} ({self.platform})"
        count = len(self.placement.devices)
        return name if count == 1 else f"{count} x {name}"

    def _empty_batches(self) -> None:
        """Rows of no request at all."""
        ranks = range(self.placement.num_ranks)
        self.batches = [InputBatch(self.max_num_seqs, self.model.vocab_size) for _ in ranks]
        self._rank_of: dict[str, int] = {}

    def _warm_up_step(self, variant: StepVariant, head: HeadVariant | None) -> jax.Array:
        """Run a step on padding; the hidden states."""
        padding = self.builder.padding(variant.bucket)
        buffer = self.placement.put_all([padding] * self.placement.num_ranks)
        _, hidden, self.state = self.programs.run(variant, head, self.params, self.state, buffer)
        return hidden

    # --- steps ----------------------------------------------------------------------------------------------

    def execute(self, scheduler_output: SchedulerOutput) -> DispatchedStep:
        """Dispatch one step without waiting for it.

        Raises:
            RuntimeError: it compiled something, where ``enforce_no_compile`` forbids that.
        """
        compilations = self.counter.count
        for request_id in (*scheduler_output.preempted_request_ids, *scheduler_output.finished_request_ids):
            self._batch_of(request_id).remove(request_id)
            self._rank_of.pop(request_id, None)
        for request in scheduler_output.new_requests:
            self._rank_of[request.request_id] = request.data_rank
            row = self.batches[request.data_rank].add(request)
            self.state = self._updates.prepare_row(self.state, request.data_rank, row)
        for request in scheduler_output.cached_requests:
            self._batch_of(request.request_id).extend(request)
        for request_id, token_ids in scheduler_output.appended_token_ids.items():
            self._append_tokens(request_id, token_ids)
        exhausted: set[str] = set()
        if scheduler_output.token_masks or any(batch.masked for batch in self.batches):
            for rank, batch in enumerate(self.batches):
                masks = changed_masks(batch, scheduler_output, exhausted)
                self.state = self._updates.set_masks(self.state, rank, masks)
        scheduled = scheduler_output.num_scheduled_tokens
        scores = any(
            batch.scoring_prompt and not batch.scoring_prompt.isdisjoint(scheduled) for batch in self.batches
        )
        decode_only = not scores and scheduler_output.num_decode_rows == len(scheduled)
        steps = self._build(scheduler_output, decode_only=decode_only)
        for rank, step in enumerate(steps):
            self.state = self._updates.patch(self.state, rank, step.early_patches)
        if scheduler_output.num_decode_steps > 1:
            dispatched = self._dispatch_burst(steps[0], scheduler_output)
            self._check_compilations(compilations)
            return dispatched
        features = functools.reduce(operator.or_, (step.features for step in steps))
        num_rows = max(len(step.request_ids) for step in steps)
        variants = self.programs.choose(steps[0].bucket, num_rows, features=features, decode_only=decode_only)
        sampled, hidden, self.state = self.programs.run(
            *variants, self.params, self.state, self.placement.put_all([step.buffer for step in steps])
        )
        dispatched = DispatchedStep(
            step_id=scheduler_output.step_id,
            sampled=sampled,
            sampling_rows=self._sampling_rows(steps, scheduler_output, len(sampled.token_ids) // len(steps)),
            num_logprobs=self._num_logprobs(steps),
            prompts=self._scorer.score(self.batches, steps, hidden) if scores else [],
            on_tokens=self._read_tokens,
            exhausted=exhausted,
            num_padded_tokens=len(steps) * steps[0].bucket.num_tokens,
        )
        dispatched.start_copies()
        self._check_compilations(compilations)
        return dispatched

    def _dispatch_burst(self, step: StepBatch, scheduler_output: SchedulerOutput) -> DispatchedStep:
        """Dispatch several decode steps at once."""
        burst = self.programs.choose_burst(step.bucket, Feature(step.features))
        sampled, self.state = self.programs.run_burst(
            burst, self.params, self.state, self.placement.put_all([step.buffer])
        )
        dispatched = DispatchedStep(
            step_id=scheduler_output.step_id,
            sampled=sampled,
            sampling_rows=list(enumerate(step.request_ids)),
            num_logprobs={},
            prompts=[],
            on_tokens=self._read_tokens,
            num_padded_tokens=burst.num_steps * step.bucket.num_tokens,
            num_burst_tokens=scheduler_output.num_scheduled_tokens,
        )
        dispatched.start_copies()
        return dispatched

    def _check_compilations(self, before: int) -> None:
        """Refuse what was compiled since there were ``before``, if that was asked for."""
        new = self.counter.count - before
        if new and self.config.compilation_config.enforce_no_compile:
            raise RuntimeError(f"A step compiled {new} program(s) after the engine was ready.")

    def _batch_of(self, request_id: str) -> InputBatch:
        """The rows that hold a request; rank 0's if none does."""
        return self.batches[self._rank_of.get(request_id, 0)]

    def _build(self, scheduler_output: SchedulerOutput, *, decode_only: bool) -> list[StepBatch]:
        """Each rank's buffer, all of one bucket."""
        if self.placement.num_ranks == 1:
            return [self.builder.build(self.batches[0], scheduler_output, decode_only=decode_only)]
        parts = split_by_rank(scheduler_output, self._rank_of, self.placement.num_ranks)
        bucket = self.builder.bucket_for(parts, decode_only=decode_only)
        return [
            self.builder.build(batch, part, decode_only=decode_only, bucket=bucket)
            for batch, part in zip(self.batches, parts, strict=True)
        ]

    def _sampling_rows(
        self, steps: list[StepBatch], scheduler_output: SchedulerOutput, rows_per_rank: int
    ) -> list[tuple[int, str]]:
        """(row of the step's output, request id) of every request that samples."""
        samples, replayed = scheduler_output.samples, scheduler_output.replayed_request_ids
        by_rank = scheduler_output.num_decode_rows_by_rank or (scheduler_output.num_decode_rows,)
        rows: list[tuple[int, str]] = []
        for rank, step in enumerate(steps):
            first, num_decode = rank * rows_per_rank, by_rank[rank]
            if num_decode == len(step.request_ids) and not replayed:
                rows += enumerate(step.request_ids, first)
                continue
            rows += [
                (first + index, request_id)
                for index, request_id in enumerate(step.request_ids)
                if (index < num_decode and request_id not in replayed) or request_id in samples
            ]
        return rows

    def _num_logprobs(self, steps: list[StepBatch]) -> dict[str, int]:
        wanted: dict[str, int] = {}
        for batch, step in zip(self.batches, steps, strict=True):
            if step.features & LOGPROBS:
                params = ((i, batch.states[i].request.sampling_params) for i in step.request_ids)
                wanted |= {i: p.logprobs for i, p in params if p.logprobs is not None}
        return wanted

    def _read_tokens(self, sampled: dict[str, list[int]]) -> None:
        """Keep what requests with a token mask sampled: their next mask may depend on it."""
        for batch in self.batches:
            for request_id, state in batch.masked.items():
                state.output_token_ids += sampled.get(request_id, ())

    def _append_tokens(self, request_id: str, token_ids: list[int]) -> None:
        """Take tokens that were not sampled here, all but the first, for a row that goes on."""
        state = self._batch_of(request_id).append(request_id, token_ids)
        if state.request.sampling_params.needs_penalties:
            rank, new = self._rank_of[request_id], np.asarray(token_ids[1:], np.int32)
            self.state = self._updates.add_history(self.state, rank, state.row, new, is_output=1)

    # --- end ------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """After a step failed: start again from empty rows and, where the step took it along, an empty cache."""
        self._empty_batches()
        jax.tree.map(lambda leaf: None if leaf.is_deleted() else leaf.delete(), self.state)
        self.state = self.placement.zeros(self.programs.state)

    def num_compilations(self) -> int:
        """Compilations since ``initialize`` returned."""
        return self.counter.count

    def close(self) -> None:
        """Free device memory, also where ``initialize`` failed half-way."""
        if self._workspaces is not None:
            with contextlib.suppress(Exception):  # a step that failed has ended as well
                jax.block_until_ready(getattr(self, "state", None))  # no device writes to its peers any more
            self._workspaces.close()
            self._workspaces = None
        for leaf in jax.tree.leaves([getattr(self, name, None) for name in ("params", "state")]):
            if not leaf.is_deleted():
                leaf.delete()
        if hasattr(self, "programs"):
            self.programs.compiled = {}

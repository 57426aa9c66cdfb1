"""EngineConfig: everything an engine is told, as frozen dataclasses that are composed once and never mutated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.config.fields import check_at_least, check_choices, setting, split_kwargs
from jaxserve.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = (*DTYPES, "fp8", "fp8_e4m3", "int8")


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how to read it."""

    model: str = setting("", "Hugging Face folder, hub id, or .gguf file. Default: the packaged SmolLM2.")
    tokenizer: str | None = setting(None, "Folder or hub id of the tokenizer, if it is not the model's own.")
    revision: str | None = setting(None, "Branch, tag or commit on the hub.")
    dtype: str = setting(
        "auto", "Compute type; auto is the checkpoint's, and float32 on CPU.", choices=DTYPES
    )
    max_model_len: int | str | None = setting(
        None,
        "Longest prompt plus output, in tokens (1k and 1K are read). Default: the model's; "
        "auto: the longest that fits the cache.",
        parse="size",
    )
    load_format: str = setting(
        "auto",
        "How weights are read; orbax are converted ones, dummy makes random ones.",
        choices=("auto", "safetensors", "gguf", "orbax", "dummy"),
    )
    hf_overrides: dict[str, Any] = setting({}, "JSON merged over the model's config.json.", parse="json")
    trust_remote_code: bool = setting(False, "Refused: jaxserve never runs code from a checkpoint.")
    skip_tokenizer_init: bool = setting(False, "Serve token ids only.")
    generation_config: str = setting(
        "auto",
        "Where sampling defaults come from: auto is the model's generation_config.json, jaxserve (or vllm) is none, "
        "else the folder of another one.",
    )
    override_generation_config: dict[str, Any] = setting(
        {}, "JSON merged over the sampling defaults.", parse="json"
    )
    max_logprobs: int = setting(20, "Largest logprobs a request may ask for; -1 allows the whole vocabulary.")
    seed: int = setting(0, "Seeds dummy weights and the requests that bring no seed.")
    chat_template: str | None = setting(None, "Jinja chat template: a file or the text itself.")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, -1, "max_logprobs")
        if isinstance(self.max_model_len, str) and self.max_model_len != "auto":
            raise ConfigError(
                f"max_model_len must be a number or 'auto', got {self.max_model_len!r}.",
                param="max_model_len",
            )
        if not isinstance(self.max_model_len, str):
            check_at_least(self, 1, "max_model_len")
        if self.trust_remote_code:
            raise ConfigError(
                "trust_remote_code is not supported: jaxserve never runs code from a checkpoint.",
                param="trust_remote_code",
            )


@dataclass(frozen=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = setting(
        None, "Tokens in a KV cache block. Default: 32 on CPU, 64 on GPU, 128 on TPU."
    )
    gpu_memory_utilization: float = setting(
        0.92, "Share of device memory that weights, programs and cache may use."
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "Bytes of KV cache a device; overrides the share. Default on CPU: 1 GiB.", parse="size"
    )
    num_gpu_blocks_override: int | None = setting(
        None, "Blocks in the cache, whatever the memory (for tests)."
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Type of cached keys and values; auto is the compute type. fp8 (e4m3) takes the checkpoint's k_scale and "
        "v_scale, else 1; int8 scales every token and head.",
        choices=KV_CACHE_DTYPES,
    )
    enable_prefix_caching: bool = setting(True, "Reuse cached blocks of equal prompt prefixes.")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "block_size", "kv_cache_memory_bytes")
        check_at_least(self, 2, "num_gpu_blocks_override")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}.",
                param="gpu_memory_utilization",
            )
        if self.block_size is not None and (self.block_size < 8 or self.block_size & (self.block_size - 1)):
            raise ConfigError(
                f"block_size must be a power of two of at least 8, got {self.block_size}.", param="block_size"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests share steps."""

    max_num_seqs: int | None = setting(
        None,
        "Requests in a step at most. Default: 64 on CPU, 1024 on GPUs of at least 70 GiB, 256 elsewhere.",
    )
    max_num_batched_tokens: int | None = setting(
        None, "Token budget of a step. Default: 512 on CPU, 8192 on GPU, 2048 on TPU.", parse="size"
    )
    enable_chunked_prefill: bool = setting(
        True, "Split prompts over steps; off: a prompt is computed in one step."
    )
    scheduling_policy: str = setting("fcfs", "Order of waiting requests.", choices=("fcfs", "priority"))
    async_scheduling: bool = setting(True, "Dispatch a step before the last one's tokens are read.")
    num_scheduler_steps: int | None = setting(
        None,
        "Decode steps in one dispatch while no request waits and at most 32 run; tokens then arrive that many at a "
        "time. Default: 4 on GPUs where a step reads so few weights that the host would take longer than the device "
        "(models of up to 8 GB, on several GPUs more), else 1.",
    )
    max_num_queued_reqs: int | None = setting(
        None, "Refuse requests (503) when this many wait. Default: no limit."
    )
    max_num_queued_tokens: int | None = setting(
        None, "Refuse requests (503) when prompts of this many tokens wait. Default: no limit.", parse="size"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "max_num_seqs", "max_num_batched_tokens")
        check_at_least(self, 1, "max_num_queued_reqs", "max_num_queued_tokens")
        check_at_least(self, 1, "num_scheduler_steps")


@dataclass(frozen=True)
class ParallelConfig:
    """How devices share the model."""

    tensor_parallel_size: int = setting(1, "Devices over which each layer is split.", flags=("-tp",))
    data_parallel_size: int = setting(
        1,
        "Groups of such devices, each with requests, rows and a cache of its own, in one engine. max_num_seqs and "
        "max_num_batched_tokens are a group's.",
        flags=("-dp",),
    )
    enable_expert_parallel: bool = setting(
        False,
        "Keep experts whole and spread them over all devices, instead of splitting each.",
        flags=("-ep",),
    )
    sequence_parallel: bool = setting(
        False,
        "Between layers, split the tokens of long steps over the devices of a group: a long prefill's norms are "
        "computed once, and its sums travel as halves.",
    )

    def __post_init__(self) -> None:
        check_at_least(self, 1, "tensor_parallel_size", "data_parallel_size")
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "sequence_parallel splits tokens over the devices of a group, and tensor_parallel_size is 1. Raise "
                "that, or leave sequence_parallel out.",
                param="sequence_parallel",
            )

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True)
class CompilationConfig:
    """The programs compiled before the engine is ready."""

    compile_cache_dir: str | None = setting(
        None, "Folder that keeps compiled programs. Default: JAXSERVE_CACHE_DIR or ~/.cache/jaxserve."
    )
    batch_invariant: bool = setting(
        False,
        "Make a request's output depend on it alone, bit for bit, whatever else runs, however its prompt is cut and "
        "whatever is cached. On CPUs and Hopper GPUs, for dense models; what it costs says docs/invariance.md.",
    )
    enforce_no_compile: bool = setting(
        False, "Fail a step that would compile after readiness (used in tests)."
    )
    log_level: str = setting("info", "Verbosity.", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class ObservabilityConfig:
    """What an engine tells about its work, beside its metrics."""

    log_format: str = setting(
        "text", "Form of log lines; json writes an object a line.", choices=("text", "json")
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "Where traces of requests go, such as http://localhost:4317 (gRPC; OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="
        "http/protobuf for HTTP). Needs the otel extra.",
    )
    profiler_dir: str | None = setting(
        None, "Folder for JAX profiles; allows /start_profile and /stop_profile."
    )

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True)
class HostsConfig:
    """Several hosts with one engine over all their devices; each one runs the same command."""

    coordinator: str | None = setting(
        None,
        "HOST:PORT of host 0, as the others reach it; PORT and the next one must be free there. Default: found by "
        "itself on a Cloud TPU pod.",
    )
    nnodes: int | None = setting(
        None, "Hosts. Default: those of the Cloud TPU pod that this host belongs to, else 1."
    )
    node_rank: int | None = setting(None, "This host's number, from 0; 0 serves, the others follow.")

    def __post_init__(self) -> None:
        check_at_least(self, 1, "nnodes")
        check_at_least(self, 0, "node_rank")
        if (self.coordinator is None) != (self.node_rank is None) or (
            self.coordinator and self.nnodes is None
        ):
            raise ConfigError(
                "--coordinator, --nnodes and --node-rank belong together: give all three, or on a Cloud TPU pod none.",
                param="coordinator",
            )
        if self.coordinator is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65535:
            raise ConfigError(
                f"coordinator must be HOST:PORT, got {self.coordinator!r}.", param="coordinator"
            )
        if self.node_rank is not None and self.nnodes is not None and self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank is {self.node_rank}, but the hosts are 0 to {self.nnodes - 1}.", param="node_rank"
            )


@dataclass(frozen=True)
class EngineConfig:
    """All configs of one engine."""

    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    hosts_config: HostsConfig = field(default_factory=HostsConfig)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from flat arguments, as ``LLM(model, max_num_seqs=16)`` and the command line give them."""
        model, cache, scheduler, parallel, compilation, observability, hosts = split_kwargs(
            kwargs, ENGINE_CONFIGS
        )
        return cls(
            ModelConfig(**model), CacheConfig(**cache), SchedulerConfig(**scheduler), ParallelConfig(**parallel),
            CompilationConfig(**compilation), ObservabilityConfig(**observability), HostsConfig(**hosts),
        )  # fmt: skip

    def with_defaults_for(self, platform: str, device_memory: int | None = None) -> EngineConfig:
        """Fill the defaults that depend on the device.

        Args:
            platform: ``cpu``, ``gpu`` or ``tpu``.
            device_memory: bytes of one device; None if it does not tell.
        """
        defaults = PLATFORM_DEFAULTS[platform]
        if platform == "gpu" and (device_memory or 0) >= LARGE_GPU_BYTES:
            defaults = replace(defaults, max_num_seqs=LARGE_GPU_SEQS)
        cache, scheduler = self.cache_config, self.scheduler_config
        cache = replace(
            cache,
            block_size=cache.block_size or defaults.block_size,
            kv_cache_memory_bytes=cache.kv_cache_memory_bytes or defaults.kv_cache_memory_bytes,
        )
        max_num_batched_tokens = scheduler.max_num_batched_tokens or defaults.max_num_batched_tokens
        max_num_seqs = scheduler.max_num_seqs or min(defaults.max_num_seqs, max_num_batched_tokens)
        if max_num_seqs > max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs ({max_num_seqs}) is greater than max_num_batched_tokens "
                f"({max_num_batched_tokens}): a step could not decode all its requests. Lower the first or raise the "
                "second.",
                param="max_num_seqs",
            )
        scheduler = replace(
            scheduler, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        return replace(self, cache_config=cache, scheduler_config=scheduler)


ENGINE_CONFIGS: list[type[Any]] = [
    ModelConfig,
    CacheConfig,
    SchedulerConfig,
    ParallelConfig,
    CompilationConfig,
    ObservabilityConfig,
    HostsConfig,
]


@dataclass(frozen=True)
class PlatformDefaults:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int | None


LARGE_GPU_BYTES, LARGE_GPU_SEQS = 70 << 30, 1024
"""GPUs with room for the caches of so many requests, and for what more rows need of sampling state and logits: 1 to
4 GiB, as the vocabulary has it."""
PLATFORM_DEFAULTS = {
    "cpu": PlatformDefaults(32, 64, 512, 1 << 30),
    "gpu": PlatformDefaults(64, 256, 8192, None),
    "tpu": PlatformDefaults(128, 256, 2048, None),
}

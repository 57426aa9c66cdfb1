"""Frozen configs; command line flags and the flag reference are generated from their fields."""

from jaxserve.config.engine_config import (
    ENGINE_CONFIGS,
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    HostsConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from jaxserve.config.server_config import ServerConfig

__all__ = [
    "ENGINE_CONFIGS",
    "CacheConfig",
    "CompilationConfig",
    "EngineConfig",
    "HostsConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "ServerConfig",
]

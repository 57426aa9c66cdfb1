"""Building an engine core with its runner. JAX is imported here, when it is first needed, and nowhere above."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore, Profiler
from jaxserve.engine.front import Front
from jaxserve.engine.grammars import grammar_compiler
from jaxserve.engine.hosts import Followers, Hosts, LeaderRunner, find_hosts, join
from jaxserve.errors import ConfigError
from jaxserve.step import ModelRunner
from jaxserve.tokenizer.interface import Tokenizer

POOL_SLACK = 0.02
"""Of a GPU's memory, what its allocator holds beyond ``gpu_memory_utilization``: pieces that fragmentation leaves."""


def create_runner(config: EngineConfig) -> tuple[ModelRunner, EngineConfig]:
    """The runner on this program's devices, not initialized, and the config with the platform's defaults filled in.

    Raises:
        ConfigError: the defaults do not go with what was given.
    """
    # How much the allocator may take is read once, when JAX first looks for devices.
    share = config.cache_config.gpu_memory_utilization
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{min(share + POOL_SLACK, 0.99):.4f}")
    # Through importlib: this room knows the runner by its protocol alone.
    model_runner: Any = importlib.import_module("jaxserve.runner.model_runner")
    config = config.with_defaults_for(model_runner.platform_name(), model_runner.device_memory())
    return model_runner.JaxModelRunner(config), config


def create_core(config: EngineConfig) -> EngineCore:
    """Load the model and everything else that an engine needs, on this process's devices; as host 0 of several hosts,
    on those of all.

    Raises:
        JaxserveError: what the user asked for cannot be had.
    """
    hosts = find_hosts(config.hosts_config)
    if hosts is None:
        runner, config = create_runner(config)
    else:
        runner, config = _create_leader(config, hosts)
    core: EngineCore | None = None

    def tokenizer_and_ends() -> tuple[Tokenizer | None, Sequence[int]]:
        front = Front.load(config.model_config)
        return front.tokenizer, front.eos_token_ids

    def vocab_size() -> int:
        assert core is not None
        return core.info.vocab_size

    grammars = grammar_compiler(tokenizer_and_ends, vocab_size)
    try:
        core = EngineCore(config, runner, grammars, _profiler(config.observability_config.profiler_dir))
    except BaseException:  # Ctrl-C while it compiles, too: the traceback keeps the runner
        runner.close()
        raise
    return core


def _create_leader(config: EngineConfig, hosts: Hosts) -> tuple[ModelRunner, EngineConfig]:
    if hosts.rank != 0:
        raise ConfigError(
            f"This is host {hosts.rank} of {hosts.count}, and host 0 alone takes requests: run 'jaxserve serve' with "
            "the same flags here. An engine of this host alone needs nnodes=1.",
            param="node_rank",
        )
    followers = Followers(hosts, config)
    try:
        followers.gather()
        join(hosts)
        runner, config = create_runner(config)
    except BaseException:
        followers.disconnect()  # and so they end
        raise
    return LeaderRunner(runner, followers), config


def _profiler(folder: str | None) -> Profiler | None:
    return None if folder is None else importlib.import_module("jaxserve.runner.profiler").JaxProfiler(folder)

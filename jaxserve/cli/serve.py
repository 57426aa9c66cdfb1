"""``jaxserve serve [MODEL]``: serve a model over HTTP."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jaxserve.config import ENGINE_CONFIGS, EngineConfig, ServerConfig
from jaxserve.config.cli_flags import add_config_flags, config_from_flags, flags_given
from jaxserve.config.config_file import FLAG, expand_config_file
from jaxserve.engine.front import read_chat_template
from jaxserve.engine.hosts import find_hosts
from jaxserve.errors import ConfigError
from jaxserve.logs import configure_logging, log_level
from jaxserve.metrics.traces import check_tracing
from jaxserve.parsers.registry import check_names

API_KEY_VARIABLE = "JAXSERVE_API_KEY"
DEV_MODE_VARIABLE = "JAXSERVE_SERVER_DEV_MODE"
PACKAGED_MODEL_NAME = "SmolLM2-135M-Instruct"
"""The name of the model that is served when none is named."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "positional_model",
        metavar="MODEL",
        nargs="?",
        help="Hugging Face folder, hub id, or .gguf file. Default: the packaged SmolLM2.",
    )
    parser.add_argument(FLAG, metavar="FILE", help="YAML file with flags; those given here win.")
    add_config_flags(parser, [*ENGINE_CONFIGS, ServerConfig])


expand = expand_config_file


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    configure_logging(getattr(arguments, "log_level", None), getattr(arguments, "log_format", None))
    engine_config, server_config = configs_from(arguments)
    check_tracing(engine_config.observability_config.otlp_traces_endpoint)
    check_names(server_config.tool_call_parser, server_config.reasoning_parser)
    chat_template = read_chat_template(engine_config.model_config.chat_template)

    hosts = find_hosts(engine_config.hosts_config)
    if hosts is not None and hosts.rank != 0:
        from jaxserve.engine.follower import follow

        return follow(engine_config, hosts)
    # The engine's code is imported after the command line is known to be right.
    from jaxserve.engine.async_engine import AsyncEngine
    from jaxserve.server.run import run_server
    from jaxserve.server.supervisor import run_servers

    model = engine_config.model_config.model
    names, root = served_names(model, server_config), model or PACKAGED_MODEL_NAME
    if server_config.api_server_count > 1:
        return run_servers(engine_config, server_config, names, model_root=root, chat_template=chat_template)
    return run_server(
        lambda: AsyncEngine.from_config(engine_config),
        server_config,
        names,
        model_root=root,
        chat_template=chat_template,
    )


def configs_from(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """The configs that the command line and the environment describe.

    Raises:
        ConfigError: a value that a config refuses, or two models.
    """
    values = flags_given(ENGINE_CONFIGS, arguments)
    if arguments.positional_model is not None:
        if values.get("model", arguments.positional_model) != arguments.positional_model:
            raise ConfigError(
                f"Two models are named: {arguments.positional_model!r} and --model {values['model']!r}.",
                param="model",
            )
        values["model"] = arguments.positional_model
    values["log_level"] = log_level(values.get("log_level"))
    server_config = config_from_flags(ServerConfig, arguments)
    server_config = replace(
        server_config,
        api_key=api_keys(server_config),
        enable_dev_mode=server_config.enable_dev_mode or os.environ.get(DEV_MODE_VARIABLE) == "1",
    )
    return EngineConfig.from_kwargs(**values), server_config


def api_keys(config: ServerConfig) -> list[str] | None:
    """The keys of the flags and the file; without any those of the environment. None guards nothing.

    Raises:
        ConfigError: the file cannot be read or holds no key, or a key is empty or no ASCII text: such a server
            would be open, or closed to everybody, without its operator knowing.
    """
    keys = list(config.api_key or ())
    if config.api_key_file is not None:
        keys += _read_keys(config.api_key_file)
    if not keys:
        keys = [key.strip() for key in os.environ.get(API_KEY_VARIABLE, "").split(",") if key.strip()]
    if any(not key.strip() or not key.isascii() or not key.isprintable() for key in keys):
        raise ConfigError("An API key must be printable ASCII text, and not empty.", param="api_key")
    return keys or None


def _read_keys(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {path!r} cannot be read: {error}", param="api_key_file") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {path!r} holds no key.", param="api_key_file")
    return keys


def served_names(model: str, config: ServerConfig) -> Sequence[str]:
    """The names that clients may ask for: as configured, else the model as it was named."""
    return config.served_model_name or [model or PACKAGED_MODEL_NAME]

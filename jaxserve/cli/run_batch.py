"""``jaxserve run-batch -i IN -o OUT``: answer an OpenAI batch file, without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tqdm.auto import tqdm

from jaxserve.cli.serve import PACKAGED_MODEL_NAME, served_names
from jaxserve.config import ENGINE_CONFIGS, EngineConfig, ServerConfig
from jaxserve.config.cli_flags import add_config_flags, config_from_flags, flags_given
from jaxserve.config.config_file import FLAG, expand_config_file
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.front import read_chat_template
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.logs import configure_logging, log_level
from jaxserve.metrics.traces import check_tracing
from jaxserve.server.app import create_app
from jaxserve.server.batch_file import BatchCounts, run_batch_file

SERVER_SETTINGS = (
    "served_model_name", "max_n", "enable_prompt_tokens_details", "trust_request_chat_template",
    "tool_call_parser", "reasoning_parser", "enable_auto_tool_choice",
)  # fmt: skip
"""What of a server's settings counts here."""

expand = expand_config_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-i", "--input-file", required=True, type=Path, metavar="FILE", help="requests, one a line"
    )
    parser.add_argument(
        "-o", "--output-file", required=True, type=Path, metavar="FILE",
        help="answers, one a line; lines that it has an answer for are skipped",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="begin the output file afresh")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=256,
        metavar="N",
        help="lines worked on at once (default: %(default)s)",
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    parser.add_argument(FLAG, metavar="FILE", help="YAML file with flags; those given here win.")
    add_config_flags(parser, ENGINE_CONFIGS)
    add_config_flags(parser, [ServerConfig], only=SERVER_SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Answer the file. The exit code is 0 if every line has an answer, refused ones among them."""
    _check(arguments)
    values = flags_given(ENGINE_CONFIGS, arguments)
    values["log_level"] = log_level(values.get("log_level"))
    configure_logging(values["log_level"], values.get("log_format"))
    check_tracing(values.get("otlp_traces_endpoint"))
    engine_config = EngineConfig.from_kwargs(**values)
    server_config = config_from_flags(ServerConfig, arguments)
    counts = asyncio.run(_run(arguments, engine_config, server_config))
    print(
        f"{counts.completed} completed, {counts.failed} failed, {counts.skipped} answered before.",
        file=sys.stderr,
    )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, got {arguments.max_concurrency}.")
    if not arguments.input_file.is_file():
        raise ConfigError(f"input_file {str(arguments.input_file)!r} is no file.")
    if arguments.output_file.exists() and arguments.output_file.samefile(arguments.input_file):
        raise ConfigError("input_file and output_file are the same file.")
    if arguments.overwrite:
        arguments.output_file.unlink(missing_ok=True)


async def _run(
    arguments: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig
) -> BatchCounts:
    model = engine_config.model_config.model
    template = read_chat_template(engine_config.model_config.chat_template)
    engine = await asyncio.to_thread(AsyncEngine.from_config, engine_config)
    try:
        names = served_names(model, server_config)
        app = create_app(
            engine, server_config, names, model_root=model or PACKAGED_MODEL_NAME, chat_template=template
        )
        with tqdm(desc="Lines", unit="line", disable=arguments.no_progress) as bar:
            return await run_batch_file(
                app,
                arguments.input_file,
                arguments.output_file,
                max_concurrency=arguments.max_concurrency,
                on_line=bar.update,
            )
    except* EngineDeadError as group:
        raise EngineDeadError(str(group.exceptions[0])) from group
    finally:
        engine.shutdown()

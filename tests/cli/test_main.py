from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxserve.cli import main as cli
from jaxserve.cli.serve import add_arguments, configs_from, read_chat_template, served_names
from jaxserve.config import ServerConfig
from jaxserve.config.cli_flags import normalise_flags
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.logs import ShortFormatter, configure_logging, log_level
from jaxserve.version import __version__

ROOT = Path(__file__).parents[2]


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"jaxserve {__version__}\n"


def test_the_version_is_the_projects():
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_nothing_heavy_is_imported_for_the_version():
    program = """
import sys
from jaxserve.cli.main import main
try:
    main(["--version"])
except SystemExit:
    pass
heavy = {"jax", "flax", "numpy", "transformers", "fastapi", "pydantic", "httpx", "msgspec", "asyncio"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["--no-such"], ["serve", "--no-such"], ["serve", "--port", "x"]]
)
def test_a_wrong_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "error: " in error
    assert "usage: jaxserve" in error or "'jaxserve serve --help'" in error


def test_a_wrong_flag_is_said_without_all_the_others(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--prot", "1", "--max_num_sequs=3", "--zzz"])
    assert ended.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(
        "unrecognized arguments: --prot --max-num-sequs=3 --zzz. Did you mean --port --max-num-seqs?"
    )
    assert second == "'jaxserve serve --help' lists all flags."


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: jaxserve {command}" in capsys.readouterr().out


# --- errors -----------------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch) -> types.ModuleType:
    """A command that raises ``failing.error``."""
    command = types.ModuleType("failing_command")

    def run(_arguments: argparse.Namespace) -> int:
        raise command.error

    command.__dict__.update(add_arguments=lambda _parser: None, run=run)
    monkeypatch.setitem(sys.modules, "failing_command", command)
    monkeypatch.setitem(cli.COMMANDS, "fail", ("failing_command", "Fail."))
    monkeypatch.delenv("JAXSERVE_LOG_LEVEL", raising=False)
    return command


@pytest.mark.parametrize(
    "error", [ConfigError("port is wrong.", param="port"), CheckpointError("a tensor is missing.")]
)
def test_our_errors_are_one_line(failing, error, capsys):
    failing.error = error
    assert cli.main(["fail"]) == 1
    assert capsys.readouterr().err == f"jaxserve fail: error: {error}\n"


def test_with_a_traceback_when_debugging(failing, monkeypatch):
    failing.error = ConfigError("port is wrong.")
    monkeypatch.setenv("JAXSERVE_LOG_LEVEL", "debug")
    with pytest.raises(ConfigError):
        cli.main(["fail"])


def test_other_errors_are_bugs_and_shown_as_such(failing):
    failing.error = RuntimeError("bug")
    with pytest.raises(RuntimeError):
        cli.main(["fail"])


def test_control_c(failing):
    failing.error = KeyboardInterrupt()
    assert cli.main(["fail"]) == 130


# --- serve ------------------------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_args(normalise_flags(arguments))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("JAXSERVE_API_KEY", "JAXSERVE_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


def test_serve_without_a_model():
    engine, server = configs_from(parse())
    assert engine.model_config.model == ""
    assert (server.host, server.port, server.api_key) == ("127.0.0.1", 8000, None)
    assert served_names("", server) == ["SmolLM2-135M-Instruct"]


def test_serve_a_model_under_names():
    engine, server = configs_from(parse("org/m", "--served_model_name", "a", "b", "--max-num-seqs", "4"))
    assert engine.model_config.model == "org/m"
    assert engine.scheduler_config.max_num_seqs == 4
    assert served_names("org/m", server) == ["a", "b"]
    assert served_names("org/m", ServerConfig()) == ["org/m"]


def test_the_model_as_a_flag():
    assert configs_from(parse("--model", "org/m"))[0].model_config.model == "org/m"
    assert configs_from(parse("org/m", "--model", "org/m"))[0].model_config.model == "org/m"
    with pytest.raises(ConfigError, match="'a' and --model 'b'"):
        configs_from(parse("a", "--model", "b"))


def test_the_api_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", "from-environment")
    assert configs_from(parse())[1].api_key == ["from-environment"]
    assert configs_from(parse("--api-key", "k1", "k2"))[1].api_key == ["k1", "k2"]


def test_the_log_level_of_the_environment(monkeypatch):
    monkeypatch.setenv("JAXSERVE_LOG_LEVEL", "WARNING")
    assert configs_from(parse())[0].compilation_config.log_level == "warning"
    assert configs_from(parse("--log-level", "error"))[0].compilation_config.log_level == "error"


def test_chat_template_as_file_or_text(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}é", encoding="utf-8")
    assert read_chat_template(str(path)) == "{{ messages }}é"
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    assert read_chat_template(None) is None
    with pytest.raises(ConfigError, match="neither a readable file nor a Jinja template"):
        read_chat_template("no/such/file")


# --- logging ----------------------------------------------------------------------------------------------


def test_log_lines_are_short():
    record = logging.LogRecord("jaxserve.engine.core", logging.INFO, "f", 1, "loading %s", ("x",), None)
    text = ShortFormatter().format(record)
    assert text.endswith(" INFO engine: loading x")
    assert text[:2] == "20"
    record = logging.LogRecord("uvicorn.error", logging.WARNING, "f", 1, "x", (), None)
    assert ShortFormatter().format(record).endswith(" WARNING uvicorn: x")
    record = logging.LogRecord("jaxserve", logging.WARNING, "f", 1, "x", (), None)
    assert ShortFormatter().format(record).endswith(" WARNING jaxserve: x")


def test_log_levels(monkeypatch):
    assert log_level() == "info"
    assert log_level("error") == "error"
    monkeypatch.setenv("JAXSERVE_LOG_LEVEL", "Debug")
    assert log_level() == "debug"
    monkeypatch.setenv("JAXSERVE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="JAXSERVE_LOG_LEVEL is 'loud'"):
        log_level()


def test_configured_processes_log_to_stderr():
    program = """
import logging
from jaxserve.logs import configure_logging
configure_logging("info")
configure_logging("info")
logging.getLogger("jaxserve.server.run").info("ready")
logging.getLogger("jaxserve.server.run").debug("hidden")
logging.getLogger("other").info("hidden")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True,
        env={**os.environ, "JAXSERVE_LOG_LEVEL": "error"},
    )  # fmt: skip
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(" INFO server: ready")
    assert configure_logging  # its effects on this process would disturb pytest's own handlers

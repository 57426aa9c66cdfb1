"""--config: a YAML file stands for flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import serve
from jaxserve.cli.main import main
from jaxserve.config.cli_flags import normalise_flags
from jaxserve.config.config_file import expand_config_file
from jaxserve.errors import ConfigError

FILE = """
model: some/model
max-num-seqs: 16
max_model_len: 4K
enable-prefix-caching: false
served-model-name: [one, two]
hf-overrides: {rope_theta: 5}
override-generation-config:
  temperature: 0.5
seed: -3
tokenizer: null
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return str(path)


def parsed(*arguments: str) -> Any:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.configs_from(parser.parse_args(normalise_flags(expand_config_file(arguments))))


@pytest.mark.parametrize("separate", [True, False])
def test_every_kind_of_value(file: str, separate: bool):
    engine, server = parsed(*(["--config", file] if separate else [f"--config={file}"]))
    assert engine.model_config.model == "some/model"
    assert engine.scheduler_config.max_num_seqs == 16
    assert engine.model_config.max_model_len == 4096
    assert not engine.cache_config.enable_prefix_caching
    assert server.served_model_name == ["one", "two"]
    assert engine.model_config.hf_overrides == {"rope_theta": 5}
    assert engine.model_config.override_generation_config == {"temperature": 0.5}
    assert engine.model_config.seed == -3
    assert engine.model_config.tokenizer is None


def test_the_command_line_wins(file: str):
    engine, server = parsed(
        "other/model",
        "--config",
        file,
        "--max_num_seqs=3",
        "--served-model-name",
        "three",
        "--enable-prefix-caching",
    )
    assert engine.model_config.model == "other/model"
    assert engine.scheduler_config.max_num_seqs == 3
    assert server.served_model_name == ["three"]
    assert engine.cache_config.enable_prefix_caching


def test_an_empty_file_changes_nothing(tmp_path: Path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert expand_config_file(["m", "--config", str(tmp_path / "empty.yaml"), "--seed", "1"]) == [
        "m",
        "--seed",
        "1",
    ]


@pytest.mark.parametrize(
    "text", ["- a\n- b\n", "just text", "{unclosed", "1: 2", "a: !!python/object:os.system x"]
)
def test_what_is_no_mapping_of_flags_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        expand_config_file(["--config", str(path)])
    assert caught.value.param == "config"


@pytest.mark.parametrize(
    "arguments", [["--config"], ["--config", "/no/such/file"], ["--config=a", "--config=b"]]
)
def test_a_missing_file(arguments: list[str]):
    with pytest.raises(ConfigError):
        expand_config_file(arguments)


def test_an_unknown_flag_in_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "unknown.yaml"
    path.write_text("max-num-seqz: 4\n")
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(path)])
    assert "--max-num-seqz" in capsys.readouterr().err


# --- API keys --------------------------------------------------------------------------------------------


def keys_of(*arguments: str) -> list[str] | None:
    return parsed(*arguments)[1].api_key


def test_keys_of_flags_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", "unused")
    path = tmp_path / "keys"
    path.write_text("# ours\nsecond\n\n  third  \n")
    assert keys_of("--api-key", "first", "--api-key-file", str(path)) == ["first", "second", "third"]


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXSERVE_API_KEY", "a, b,")
    assert keys_of() == ["a", "b"]
    monkeypatch.setenv("JAXSERVE_API_KEY", "")
    assert keys_of() is None


@pytest.mark.parametrize("content", ["", "# only a comment\n", "käse\n"])
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, content: str):
    """Such a server would be open."""
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError):
        keys_of("--api-key-file", str(path))


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError):
        keys_of("--api-key", "")


def test_a_missing_key_file_is_refused():
    with pytest.raises(ConfigError):
        keys_of("--api-key-file", "/no/such/file")


def test_development_mode(monkeypatch: pytest.MonkeyPatch):
    assert not parsed()[1].enable_dev_mode
    assert parsed("--enable-dev-mode")[1].enable_dev_mode
    monkeypatch.setenv("JAXSERVE_SERVER_DEV_MODE", "1")
    assert parsed()[1].enable_dev_mode

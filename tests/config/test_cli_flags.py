from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import ENGINE_CONFIGS, EngineConfig, ServerConfig
from jaxserve.config.cli_flags import (
    SIZE_SUFFIXES,
    add_config_flags,
    config_from_flags,
    flag_name,
    flag_reference,
    flags_given,
    normalise_flags,
    parse_size,
)
from jaxserve.config.fields import setting
from jaxserve.errors import ConfigError

ALL = [*ENGINE_CONFIGS, ServerConfig]
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ExampleConfig:
    """Everything a setting can be. Second sentence."""

    name: str = setting("x", "A name, 100% free.")
    count: int | None = setting(None, "A count.", flags=("-c",))
    share: float = setting(0.5, "A share.")
    fast: bool = setting(True, "Fast|slow.")
    mode: str = setting("a", "A mode.", choices=("a", "b"))
    size: int = setting(1024, "A size.", parse="size")
    length: int | str | None = setting(None, "A length or a word.", parse="size")
    extra: dict[str, Any] = setting({}, "An object.", parse="json")
    names: list[str] | None = setting(None, "Names.", parse="list")


def parse(*arguments: str, configs: list[type[Any]] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(parser, configs or [ExampleConfig])
    return parser.parse_args(normalise_flags(arguments))


def example(*arguments: str) -> ExampleConfig:
    return config_from_flags(ExampleConfig, parse(*arguments))


def test_without_flags_the_defaults_hold():
    assert example() == ExampleConfig()
    assert vars(parse()) == {}


@pytest.mark.parametrize(
    "arguments, field, value",
    [
        (["--name", "y"], "name", "y"),
        (["--name=-y"], "name", "-y"),
        (["--count", "3"], "count", 3),
        (["-c", "3"], "count", 3),
        (["--share", "0.25"], "share", 0.25),
        (["--fast"], "fast", True),
        (["--no-fast"], "fast", False),
        (["--no-fast", "--fast"], "fast", True),
        (["--mode", "b"], "mode", "b"),
        (["--size", "8k"], "size", 8000),
        (["--length", "8K"], "length", 8192),
        (["--length", "auto"], "length", "auto"),
        (["--extra", '{"a": [1]}'], "extra", {"a": [1]}),
        (["--names", "a", "b"], "names", ["a", "b"]),
        (["--names", "a", "--names", "b"], "names", ["a", "b"]),
    ],
)
def test_flags_become_fields(arguments, field, value):
    assert example(*arguments) == dataclasses.replace(ExampleConfig(), **{field: value})


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--count", "x"], "invalid int value: 'x'"),
        (["--share", "x"], "invalid float value: 'x'"),
        (["--mode", "c"], "invalid choice: 'c'"),
        (["--size", "x"], "'x' is not a size"),
        (["--size", "1q"], "'1q' is not a size"),
        (["--size", "1.0001k"], "not a whole number"),
        (["--extra", "{"], "not JSON"),
        (["--extra", "[1]"], "not a JSON object"),
        (["--names"], "expected at least one argument"),
        (["--no-such"], "unrecognized arguments: --no-such"),
        (["--nam", "x"], "unrecognized arguments: --nam"),
    ],
)
def test_mistakes_are_explained(arguments, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        example(*arguments)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


def test_underscores_are_dashes_in_names_only():
    assert normalise_flags(["--a_b=c_d", "--e_f", "g_h", "-i_j", "--", "--k_l"]) == [
        "--a-b=c_d", "--e-f", "g_h", "-i_j", "--", "--k_l",
    ]  # fmt: skip


@given(st.integers(0, 2**60))
def test_plain_sizes(number):
    assert parse_size(str(number)) == number


@given(st.integers(0, 2**20), st.sampled_from(sorted(set(SIZE_SUFFIXES) - {""})))
def test_sizes_with_suffixes(number, suffix):
    assert parse_size(f"{number}{suffix}") == number * SIZE_SUFFIXES[suffix]


@given(st.text(max_size=8))
def test_any_text_is_a_size_or_refused(text):
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert isinstance(size, int)
    assert text.strip()[:1] in "-0123456789"


def test_fractions():
    assert parse_size("1.5G") == 3 * 2**29
    assert parse_size("0.5k") == 500
    for wrong in ("inf", "nan", "infk", "nanM", "1e400k", "", "k", "-"):
        with pytest.raises(ValueError):
            parse_size(wrong)


def test_field_names_are_unique():
    names = [field.name for config in ALL for field in dataclasses.fields(config)]
    assert len(names) == len(set(names))


def test_every_setting_has_a_flag_and_help():
    parser = argparse.ArgumentParser()
    add_config_flags(parser, ALL)
    text = " ".join(parser.format_help().split())
    for config in ALL:
        for field in dataclasses.fields(config):
            assert flag_name(field.name) in text
            assert field.metadata["help"][:20] in text


def test_engine_config_from_flags():
    flags = parse(
        "--model", "m", "--max_model_len", "1k", "-tp", "2", "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes", "2G", "--hf-overrides", '{"a": 1}', "--port", "0", configs=ALL,
    )  # fmt: skip
    config = EngineConfig.from_kwargs(**flags_given(ENGINE_CONFIGS, flags))
    assert config.model_config.model == "m"
    assert config.model_config.max_model_len == 1000
    assert config.model_config.hf_overrides == {"a": 1}
    assert config.parallel_config.tensor_parallel_size == 2
    assert config.cache_config.enable_prefix_caching is False
    assert config.cache_config.kv_cache_memory_bytes == 2 << 30
    assert config_from_flags(ServerConfig, flags).port == 0


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--shutdown-timeout", "-1"], ["--max-body-bytes", "0"]]
)
def test_values_that_a_config_refuses(arguments):
    with pytest.raises(ConfigError):
        config_from_flags(ServerConfig, parse(*arguments, configs=[ServerConfig]))


def test_reference():
    text = flag_reference([ExampleConfig])
    assert "Everything a setting can be. Second sentence." in text
    assert "| `-c`, `--count` |  | A count. |" in text
    assert "| `--fast`, `--no-fast` | `true` | Fast\\|slow. |" in text
    assert "| `--mode` | `a` | A mode. One of `a`, `b`. |" in text


def test_the_reference_in_docs_is_up_to_date():
    spec = importlib.util.spec_from_file_location("write_flags", ROOT / "scripts" / "write_flags.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == script.flags_page(), "run: python scripts/write_flags.py"


def test_sequence_parallel_needs_a_group():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 1"):
        EngineConfig.from_kwargs(model="m", sequence_parallel=True)
    assert EngineConfig.from_kwargs(model="m", sequence_parallel=True, tensor_parallel_size=2)

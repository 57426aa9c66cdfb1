"""``jaxserve check-invariance [MODEL]``: try on this machine what may change a request's output."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.config import ENGINE_CONFIGS
from jaxserve.config.cli_flags import add_config_flags, flags_given
from jaxserve.errors import ConfigError
from jaxserve.logs import configure_logging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "positional_model", metavar="MODEL", nargs="?",
        help="Hugging Face folder, hub id, or .gguf file. Default: the packaged SmolLM2.",
    )  # fmt: skip
    parser.add_argument(
        "--company", type=int, nargs="+", default=[1, 7, 31], metavar="N",
        help="Numbers of other requests that a request is put among. Default: 1 7 31.",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="Tries of each. Default: 2.")
    add_config_flags(parser, ENGINE_CONFIGS)


def run(arguments: argparse.Namespace) -> int:
    """Print a line a condition. The exit code is 1 if any output differed by a bit."""
    numbers: dict[str, list[int]] = {"company": arguments.company, "rounds": [arguments.rounds]}
    for name, given in numbers.items():
        if min(given) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {min(given)}.", param=name)
    values: dict[str, Any] = {"log_level": "warning", **flags_given(ENGINE_CONFIGS, arguments)}
    named, positional = values.get("model"), arguments.positional_model
    if named is not None and positional not in (None, named):
        raise ConfigError(f"Two models are named: {positional!r} and --model {named!r}.", param="model")
    values["model"] = named or positional or ""
    configure_logging(values["log_level"])
    # The engine's code is imported after the command line is known to be right.
    from jaxserve.bench.invariance import check_invariance
    from jaxserve.engine.llm import LLM

    mode = "on" if values.get("batch_invariant") else "off"
    print(f"batch_invariant is {mode}. Outputs with tokens and log probabilities, compared bit for bit:")

    def make_llm(**overrides: Any) -> LLM:
        return LLM(**{**values, **overrides})

    failed = False
    for finding in check_invariance(make_llm, company=arguments.company, rounds=arguments.rounds):
        verdict = "same" if not finding.different else f"{finding.different} differ"
        if finding.other_tokens:
            verdict += f", {finding.other_tokens} in their tokens"
        note = f" ({finding.note})" if finding.note else ""
        print(f"  {finding.condition:<62} {finding.situations:>4} outputs: {verdict}{note}", flush=True)
        failed = failed or finding.different > 0
    return int(failed)

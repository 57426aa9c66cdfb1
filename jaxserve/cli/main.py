"""The ``jaxserve`` command: a table of commands, each a module that is imported only when it is used."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NoReturn, Protocol, cast

from jaxserve.config.cli_flags import normalise_flags
from jaxserve.errors import JaxserveError
from jaxserve.logs import LOG_LEVEL_VARIABLE
from jaxserve.version import __version__

COMMANDS = {
    "serve": ("jaxserve.cli.serve", "Serve a model over HTTP, with OpenAI's API."),
    "serve-ray": ("jaxserve.ray_serve.command", "Serve a model with several engines, on a Ray cluster."),
    "run-batch": ("jaxserve.cli.run_batch", "Answer an OpenAI batch file, without a server."),
    "chat": ("jaxserve.cli.chat", "Talk to a server."),
    "complete": ("jaxserve.cli.complete", "Let a server complete a text."),
    "top": ("jaxserve.cli.top", "Watch a server in the terminal."),
    "bench": ("jaxserve.cli.bench", "Measure a server, offline generation, or starts."),
    "plan": (
        "jaxserve.cli.plan",
        "Say what a model needs on a TPU slice or GPU node, and compile it for one.",
    ),
    "convert": ("jaxserve.cli.convert", "Save a model in the form that an engine starts from fastest."),
    "check-invariance": (
        "jaxserve.cli.check_invariance",
        "Try whether outputs depend on what else runs, on this machine.",
    ),
    "collect-env": ("jaxserve.cli.collect_env", "Print versions and devices, for a bug report."),
}
"""A command's name, its module and what it does. A module has ``add_arguments`` and ``run``; it may have ``expand``,
which gets the arguments before they are parsed."""


class Command(Protocol):
    """What a command's module offers."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong with a command line, and what may be meant, without a hundred flags before it."""

    def error(self, message: str) -> NoReturn:
        flags = self._option_string_actions
        unknown = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        near = [match for flag in unknown if flag not in flags for match in get_close_matches(flag, flags, 1)]
        hint = f" Did you mean {' '.join(near)}?" if near else ""
        self.exit(2, f"{self.prog}: error: {message}.{hint}\n'{self.prog} --help' lists all flags.\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. The exit code is 1 after an error with a message of ours, 2 after wrong flags."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        return _without_command(given)
    module, description = COMMANDS[given[0]]
    command = cast("Command", importlib.import_module(module))
    parser = CommandParser(prog=f"jaxserve {given[0]}", description=description, allow_abbrev=False)
    command.add_arguments(parser)
    try:
        expand = getattr(command, "expand", list[str])
        return command.run(parser.parse_args(normalise_flags(expand(given[1:]))))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; keep Python from complaining while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except JaxserveError as error:
        if os.environ.get(LOG_LEVEL_VARIABLE, "").lower() == "debug":
            raise
        print(f"jaxserve {given[0]}: error: {error}", file=sys.stderr)
        return 1


def _without_command(given: list[str]) -> int:
    lines = [f"  {name:16} {description}" for name, (_, description) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="jaxserve",
        usage="jaxserve [--version] COMMAND …",
        epilog="commands:\n" + "\n".join(lines) + "\n\n'jaxserve COMMAND --help' says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=list(COMMANDS))
    parser.parse_args(given[:1])
    return 2


if __name__ == "__main__":
    sys.exit(main())

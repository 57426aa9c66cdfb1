"""``jaxserve complete``: let a server go on with a text."""

from __future__ import annotations

import argparse

from jaxserve.cli.client import add_client_arguments, ask_repeatedly, connected, print_pieces

HINT = "Type the beginning of a text. Ctrl-C stops an answer, Ctrl-D ends."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_client_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Complete one text (``-q``) or line after line."""
    with connected(arguments) as client:

        def complete(text: str) -> bool:
            """Print what follows ``text``. Whether the user stopped it."""
            _, stopped = print_pieces(client.complete(text))
            return stopped

        if arguments.quick is not None:
            return 130 if complete(arguments.quick) else 0
        return ask_repeatedly(complete, HINT)

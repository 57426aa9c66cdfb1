"""``jaxserve chat``: talk to a server in the terminal."""

from __future__ import annotations

import argparse

from jaxserve.cli.client import Client, add_client_arguments, ask_repeatedly, connected, print_pieces

HINT = "Type a message. Ctrl-C stops an answer, Ctrl-D ends the chat."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="the conversation's first message")


def run(arguments: argparse.Namespace) -> int:
    """Answer one message (``-q``) or a conversation."""
    system = arguments.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    with connected(arguments) as client:
        if arguments.quick is not None:
            return 130 if answer(client, messages, arguments.quick) else 0
        return ask_repeatedly(lambda text: answer(client, messages, text), HINT)


def answer(client: Client, messages: list[dict[str, str]], text: str) -> bool:
    """Print the answer to ``text`` and remember both in ``messages``. Whether the user stopped it."""
    messages.append({"role": "user", "content": text})
    said, stopped = print_pieces(client.chat(messages))
    messages.append({"role": "assistant", "content": said})
    return stopped

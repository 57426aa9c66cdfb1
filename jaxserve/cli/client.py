"""A client of a running server, for ``chat`` and ``complete``: flags, streaming to the terminal, errors."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import httpx

from jaxserve.errors import JaxserveError

DEFAULT_URL = "http://localhost:8000/v1"
API_KEY_VARIABLES = ("JAXSERVE_API_KEY", "OPENAI_API_KEY")
CONNECT_SECONDS = 10.0


class ServerError(JaxserveError):
    """What the server said, or that there is none."""


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that all clients share."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's address (default: %(default)s)")
    parser.add_argument("--model-name", help="the model to ask; default: the first that the server names")
    parser.add_argument("--api-key", help=f"default: the environment's {' or '.join(API_KEY_VARIABLES)}")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="tokens of an answer; default: the server's"
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send one text, print the answer and exit")


class Client:
    """A server's completions, as text that comes piece by piece."""

    def __init__(self, http: httpx.Client, model: str | None, max_tokens: int | None) -> None:
        self._http = http
        self._max_tokens = max_tokens
        self.model = model or self._first_model()

    def chat(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the answer to a conversation."""
        for choice in self._choices("/chat/completions", {"messages": messages}):
            yield choice["delta"].get("content") or ""

    def complete(self, prompt: str) -> Iterator[str]:
        """Pieces of the text that follows ``prompt``."""
        for choice in self._choices("/completions", {"prompt": prompt}):
            yield choice["text"]

    def _choices(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        sent = {"model": self.model, "stream": True, **body}
        if self._max_tokens is not None:
            sent["max_tokens"] = self._max_tokens
        with self._http.stream("POST", _relative(path), json=sent) as response:
            _check(response)
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ServerError(chunk["error"]["message"])
                yield from chunk["choices"]

    def _first_model(self) -> str:
        response = self._http.get(_relative("/models"))
        _check(response)
        return response.json()["data"][0]["id"]


@contextlib.contextmanager
def connected(arguments: argparse.Namespace) -> Generator[Client, None, None]:
    """A client for the server that the flags name.

    Raises:
        ServerError: there is no server, or it refuses.
    """
    key = arguments.api_key or environment_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    url = arguments.url.rstrip("/")
    if url.count("/") == 2:  # a bare address: the API lives below /v1
        url += "/v1"
    try:
        with httpx.Client(base_url=url + "/", headers=headers, timeout=timeout) as http:
            yield Client(http, arguments.model_name, arguments.max_tokens)
    except httpx.ConnectError:
        raise ServerError(
            f"No server answers at {arguments.url}. Start one with 'jaxserve serve', or name it with --url."
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"The connection to {arguments.url} failed: {error}") from None


def environment_key() -> str | None:
    """The API key that the environment names; of several, which a server's variable may hold, the first."""
    given = next(filter(None, map(os.environ.get, API_KEY_VARIABLES)), "")
    return next((key.strip() for key in given.split(",") if key.strip()), None)


def print_pieces(pieces: Iterator[str]) -> tuple[str, bool]:
    """Print pieces as they come; Ctrl-C stops them. The text so far, and whether it was stopped."""
    printed: list[str] = []
    stopped = False
    try:
        for piece in pieces:
            printed.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        stopped = True
        close = getattr(pieces, "close", None)
        if close is not None:
            close()  # closes the connection, which makes the server abort the request
    print(flush=True)
    return "".join(printed), stopped


def ask_repeatedly(answer: Callable[[str], object], hint: str) -> int:
    """Answer line by line until the input ends. The exit code."""
    interactive = sys.stdin.isatty()
    if interactive:
        print(hint, file=sys.stderr)
    while True:
        try:
            text = input("> " if interactive else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            return 0
        if text.strip():
            answer(text)


def _relative(path: str) -> str:
    """httpx resolves paths against the base URL, whose own path is kept only for relative ones."""
    return path.lstrip("/")


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {response.status_code} from {response.url}; is this an OpenAI-compatible server?"
    raise ServerError(message)

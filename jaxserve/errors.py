"""Every error a user can meet, typed, so that each surface (Python, CLI, HTTP) can render it in its own form."""

from __future__ import annotations


class JaxserveError(Exception):
    """Base of all errors raised on purpose. The message says what is wrong, with the value, and what to do."""


class InvalidRequestError(JaxserveError, ValueError):
    """A request's mistake: a 400 over HTTP, an exception in Python.

    Args:
        message: what is wrong, with the value and what is allowed.
        param: the name of the parameter at fault, as the user spelt it.
        code: OpenAI's machine-readable code where it has one (``context_length_exceeded``).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class UnsupportedError(InvalidRequestError):
    """A known parameter or feature that jaxserve does not offer: refused by name, never ignored."""


class ModelNotFoundError(JaxserveError):
    """The named model is not served here, or cannot be found on disk, in the cache or on the hub."""


class ConfigError(JaxserveError, ValueError):
    """A flag or engine argument that cannot be honoured."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class UnsupportedModelError(ConfigError):
    """The checkpoint's architecture (or a feature it asks for) is not implemented."""


class CheckpointError(JaxserveError):
    """A checkpoint that is broken: a missing tensor, a wrong shape, a truncated file."""


class OutOfMemoryError(ConfigError):
    """The model and the smallest useful cache do not fit; the message says by how much and what to lower."""


class EngineDeadError(JaxserveError):
    """The engine core died; no request can be served until the process is restarted."""


class RequestFailedError(JaxserveError):
    """A step failed while this request was in it; the server goes on."""


class QueueFullError(JaxserveError):
    """Too many requests or tokens wait already (HTTP 503).

    Args:
        message: what is full.
        reason: one word for the metrics: queue_full, queued_tokens or draining.
    """

    def __init__(self, message: str, *, reason: str = "queue_full") -> None:
        super().__init__(message)
        self.reason = reason

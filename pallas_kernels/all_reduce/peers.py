"""The table of peers of the program that is being traced: what a layer's all-reduce needs and no layer holds.

It is an argument of each program, and reaches the layers beside their own arguments, as mesh axes do. A function that
is traced once for many programs takes it as an argument and calls ``reaching`` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_table: ContextVar[jax.Array | None] = ContextVar("peers", default=None)


@contextmanager
def reaching(peers: jax.Array | None) -> Iterator[None]:
    """Trace with this table, int32[1 + 2 * devices] (``Workspaces.peers``); None: with none."""
    before = _table.set(peers)
    try:
        yield
    finally:
        _table.reset(before)


def current_peers() -> jax.Array | None:
    """The table of the innermost ``reaching``."""
    return _table.get()

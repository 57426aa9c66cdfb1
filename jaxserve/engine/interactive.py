"""What an interactive Python, such as a notebook, keeps alive although nobody means to: LLMs that fill a device.

Both functions are for the moment before another LLM takes its memory.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import linecache
import sys
import traceback
from types import FrameType


def drop_failed_calls() -> None:
    """Free what only a failed or interrupted call into jaxserve still holds.

    The interpreter keeps the last exception for its debugger, with the frames it passed.
    """
    failure = getattr(sys, "last_value", None)
    while isinstance(failure, BaseException):
        for frame, _ in traceback.walk_tb(failure.__traceback__):
            if str(frame.f_globals.get("__name__", "")).startswith("jaxserve."):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
                    _ = frame.f_locals  # before Python 3.13 a dict of its own, made anew by being read
        failure = failure.__cause__ or failure.__context__
    gc.collect()


def drop_replaced(constructor: FrameType | None, kind: type[object]) -> None:
    """Where ``name = kind(…)`` runs, let the name go of the ``kind`` that it holds.

    Python binds a name after the call: running a cell again would need the memory of both. Whoever else refers to the
    first one keeps it.

    Args:
        constructor: the frame of ``__init__``; only a call at the top level of a cell or module counts.
        kind: a class.
    """
    caller = None if constructor is None else constructor.f_back
    if caller is None or caller.f_locals is not caller.f_globals:
        return
    for name in _assigned(caller):
        if isinstance(caller.f_globals.get(name), kind):
            del caller.f_globals[name]


def _assigned(frame: FrameType) -> list[str]:
    """The names to which the statement that ``frame`` runs assigns the result of one call."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        statements = ast.parse("".join(lines)).body
    except SyntaxError:
        return []
    for statement in statements:
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or statement.lineno):
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
                targets = statement.targets
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Call):
                targets = [statement.target]
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []

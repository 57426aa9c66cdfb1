"""One HTTP call: its id, when it began, the model it is answered as; and how a whole answer is awaited."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starlette.requests import Request

from jaxserve.outputs import RequestOutput
from jaxserve.server.generation import Submission
from jaxserve.server.streaming import run_while_connected


@dataclass(frozen=True, slots=True)
class Call:
    """What every chunk and body of an answer repeats.

    Args:
        id: the answer's id, such as ``chatcmpl-…``.
        created: seconds since the epoch.
        model: the name under which the client asked.
    """

    id: str
    created: int
    model: str


def begin_call(request: Request, prefix: str, request_id: str | None, model: str) -> Call:
    """The call of ``request``; its id is the body's ``request_id``, else the header's, else a random one."""
    return Call(f"{prefix}-{request_id or request.state.request_id}", int(time.time()), model)


async def collect(request: Request, submission: Submission) -> list[RequestOutput]:
    """The complete outputs, one per prompt. The requests are aborted if the client leaves first.

    Raises:
        ClientDisconnected: it left.
    """
    try:
        return await run_while_connected(request.receive, submission.collect())
    finally:
        await submission.aclose()

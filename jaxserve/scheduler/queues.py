"""Queues of waiting requests: first come first served, or by priority.

A request that was aborted while it waited is not searched for: its entry is skipped when it comes up, and the
dead entries are swept out together once they outnumber the live ones.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque

from jaxserve.request import Request

_MIN_SWEEP = 64
"""Dead entries below this number are not worth a sweep."""


class RequestQueue(ABC):
    """Waiting requests in the order in which they are to run. ``len`` counts the live ones."""

    def __init__(self) -> None:
        self._num_live = 0
        self._num_dead = 0

    def __len__(self) -> int:
        return self._num_live

    def add(self, request: Request) -> None:
        """Enqueue a new request."""
        self._push(request)
        self._num_live += 1

    def put_back(self, request: Request) -> None:
        """Enqueue a request that was taken out of this queue before; it keeps its place ahead of later ones.

        Several requests are put back last one first.
        """
        self._push_front(request)
        self._num_live += 1

    def insert(self, request: Request) -> None:
        """Enqueue a request in its place by ``Request.order``: one that could not wait here before."""
        self._insert(request)
        self._num_live += 1

    def peek(self) -> Request:
        """The next request. Raises IndexError when there is none."""
        while (request := self._head()).finished:
            self._pop_head()
            self._num_dead -= 1
        return request

    def pop(self) -> Request:
        """Take out the next request. Raises IndexError when there is none."""
        request = self.peek()
        self._pop_head()
        self._num_live -= 1
        return request

    def discard(self) -> None:
        """Note that a request of this queue has just become ``finished``."""
        self._num_live -= 1
        self._num_dead += 1
        if self._num_dead > max(_MIN_SWEEP, self._num_live):
            self._sweep()
            self._num_dead = 0

    @abstractmethod
    def _push(self, request: Request) -> None: ...

    @abstractmethod
    def _push_front(self, request: Request) -> None: ...

    @abstractmethod
    def _insert(self, request: Request) -> None: ...

    @abstractmethod
    def _head(self) -> Request: ...

    @abstractmethod
    def _pop_head(self) -> None: ...

    @abstractmethod
    def _sweep(self) -> None: ...


class FCFSQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._deque: deque[Request] = deque()

    def _push(self, request: Request) -> None:
        self._deque.append(request)

    def _push_front(self, request: Request) -> None:
        self._deque.appendleft(request)

    def _insert(self, request: Request) -> None:
        insort(self._deque, request, key=_order)

    def _head(self) -> Request:
        return self._deque[0]

    def _pop_head(self) -> None:
        self._deque.popleft()

    def _sweep(self) -> None:
        self._deque = deque(request for request in self._deque if not request.finished)


class PriorityQueue(RequestQueue):
    """The smallest ``Request.order`` first; orders are distinct."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[tuple[int, float, int], Request]] = []

    def _push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request))

    def _push_front(self, request: Request) -> None:
        self._push(request)

    def _insert(self, request: Request) -> None:
        self._push(request)

    def _head(self) -> Request:
        return self._heap[0][1]

    def _pop_head(self) -> None:
        heapq.heappop(self._heap)

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if not entry[1].finished]
        heapq.heapify(self._heap)


def _order(request: Request) -> tuple[int, float, int]:
    return request.order


def make_queue(policy: str) -> RequestQueue:
    """The queue of a ``scheduling_policy``."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()

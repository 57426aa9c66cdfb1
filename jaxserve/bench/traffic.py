"""When requests are sent: at a rate, more or less bursty, with a ramp; and how many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf, isinf

import numpy as np

from jaxserve.bench.endpoint import BenchRequest, RequestResult
from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class Traffic:
    """The arrivals of requests.

    Args:
        request_rate: requests a second; ``inf`` sends all at once.
        burstiness: shape of the gamma distribution of the times between requests: 1 is a Poisson process, less is
            burstier, more is more regular.
        max_concurrency: requests in flight at most.
        ramp_up: ``linear`` or ``exponential``: the rate goes from ``ramp_up_start_rps`` to ``ramp_up_end_rps``.
    """

    request_rate: float = inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up: str | None = None
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"request_rate must be above 0, got {self.request_rate}.", param="request_rate")
        if not self.burstiness > 0 or isinf(self.burstiness):
            raise ConfigError(
                f"burstiness must be above 0 and finite, got {self.burstiness}.", param="burstiness"
            )
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(
                f"max_concurrency must be at least 1, got {self.max_concurrency}.", param="max_concurrency"
            )
        if self.ramp_up is None:
            return
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if start is None or end is None:
            raise ConfigError(
                "A ramp-up needs --ramp-up-start-rps and --ramp-up-end-rps.", param="ramp_up_start_rps"
            )
        if not isinf(self.request_rate):
            raise ConfigError("A ramp-up sets the rate: leave --request-rate out.", param="request_rate")
        if not 0 < start <= end:
            raise ConfigError(
                f"ramp_up_start_rps must be above 0 and not above ramp_up_end_rps, got {start} and {end}.",
                param="ramp_up_start_rps",
            )

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the start at which each of ``count`` requests is sent, in order."""
        rates = self._rates(count)
        if isinf(rates[0]):
            return [0.0] * count
        rng = np.random.default_rng(seed)
        gaps = rng.gamma(self.burstiness, 1 / (rates * self.burstiness))
        times = np.cumsum(gaps)
        if self.ramp_up is None and times[-1] > 0:
            # A sample's mean differs from the rate that was asked for; runs are compared by that.
            times *= count / self.request_rate / times[-1]
        return times.tolist()

    def _rates(self, count: int) -> np.ndarray:
        if self.ramp_up is None or self.ramp_up_start_rps is None or self.ramp_up_end_rps is None:
            return np.full(count, self.request_rate)
        progress = np.arange(count) / max(1, count - 1)
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        return (
            start + (end - start) * progress
            if self.ramp_up == "linear"
            else start * (end / start) ** progress
        )


Send = Callable[[BenchRequest, int], Awaitable[RequestResult]]


async def send_all(
    send: Send,
    requests: Sequence[BenchRequest],
    traffic: Traffic,
    seed: int,
    on_done: Callable[[], object] = lambda: None,
) -> tuple[list[RequestResult], float]:
    """Send requests as ``traffic`` has it.

    Args:
        send: sends one, with its number, and returns what came of it.
        requests, traffic, seed: which, and when.
        on_done: called after each one.

    Returns:
        The results in the requests' order, and the seconds from the first to the last answer's end.
    """
    limit = None if traffic.max_concurrency is None else asyncio.Semaphore(traffic.max_concurrency)
    arrivals = traffic.arrivals(len(requests), seed)

    async def send_one(index: int) -> RequestResult:
        arrived = time.perf_counter()
        if limit is None:
            result = await send(requests[index], index)
        else:
            async with limit:
                result = await send(requests[index], index)
        result.queue_time = result.start_time - arrived
        on_done()
        return result

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[RequestResult]] = []
        for index, offset in enumerate(arrivals):
            if (delay := began + offset - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            tasks.append(group.create_task(send_one(index)))
    return [task.result() for task in tasks], time.perf_counter() - began

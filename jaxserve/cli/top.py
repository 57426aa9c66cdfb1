"""``jaxserve top``: what a server does, live in the terminal, from its /metrics. ``q`` or Ctrl-C ends it."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.cli.client import API_KEY_VARIABLES, environment_key
from jaxserve.errors import ConfigError, JaxserveError

DEFAULT_URL = "http://localhost:8000"
HTTP_SECONDS = 10.0
PREFIX = "jaxserve:"
BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 512
"""Samples that are kept for the curves."""
ENTER = "\x1b[?1049h\x1b[?25l"
"""The terminal's other screen, without a cursor."""
LEAVE = "\x1b[?25h\x1b[?1049l"
HOME = "\x1b[H"
CLEAR_LINE, CLEAR_BELOW = "\x1b[K", "\x1b[J"
BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"

Labels = tuple[tuple[str, str], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's address (default: %(default)s)")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds (default: %(default)s)"
    )
    parser.add_argument("--api-key", help=f"default: the environment's {' or '.join(API_KEY_VARIABLES)}")
    parser.add_argument("--once", action="store_true", help="print one picture of an interval and exit")


def run(arguments: argparse.Namespace) -> int:
    """Show the server until asked to stop.

    Raises:
        JaxserveError: there is no server at first, or it refuses. One that leaves later is waited for.
    """
    if not arguments.interval > 0:
        raise ConfigError(f"interval must be above 0, got {arguments.interval}.", param="interval")
    key = arguments.api_key or environment_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = arguments.url.rstrip("/").removesuffix("/v1")
    with httpx.Client(headers=headers, timeout=HTTP_SECONDS) as http:
        history = History(read(http, url))
        if arguments.once or not sys.stdout.isatty():
            return _print_once(http, url, history, arguments.interval)
        with _screen():
            return _watch(http, url, history, arguments.interval)


def _print_once(http: httpx.Client, url: str, history: History, interval: float) -> int:
    time.sleep(interval)
    history.add(read(http, url))
    print("\n".join(picture(history, url, shutil.get_terminal_size().columns, styled=False)))
    return 0


def _watch(http: httpx.Client, url: str, history: History, interval: float) -> int:
    trouble = ""
    while True:
        size = shutil.get_terminal_size()
        lines = picture(history, url, size.columns, styled=True, trouble=trouble)[: size.lines - 1]
        text = "".join(line + CLEAR_LINE + "\r\n" for line in lines)
        sys.stdout.write(HOME + text + CLEAR_BELOW)
        sys.stdout.flush()
        if _asked_to_quit(interval):
            return 0
        try:
            history.add(read(http, url))
            trouble = ""
        except JaxserveError as error:
            trouble = str(error)


@contextlib.contextmanager
def _screen() -> Generator[None, None, None]:
    """The terminal's other screen, keys unbuffered; as it was afterwards, however it ends."""
    import termios
    import tty

    fd = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if fd is None else termios.tcgetattr(fd)
    try:
        if fd is not None:
            tty.setcbreak(fd)
        sys.stdout.write(ENTER)
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        if fd is not None and before is not None:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _asked_to_quit(seconds: float) -> bool:
    """Wait so long for a ``q``."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0] and os.read(sys.stdin.fileno(), 1) in (
            b"q",
            b"Q",
            b"",
        ):
            return True
    return False


# --- what the server says -------------------------------------------------------------------------------------


@dataclass
class Sample:
    """All metrics at one moment."""

    time: float
    values: dict[str, dict[Labels, float]]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all labels but those given."""
        wanted = set(labels.items())
        return sum(
            value for found, value in self.values.get(PREFIX + name, {}).items() if wanted <= set(found)
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric by one label."""
        sums: dict[str, float] = {}
        for labels, value in self.values.get(PREFIX + name, {}).items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums


def read(http: httpx.Client, url: str) -> Sample:
    """The server's metrics now.

    Raises:
        JaxserveError: no server, or none of ours.
    """
    try:
        response = http.get(url + "/metrics")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise JaxserveError(f"No server answers at {url}: {error}") from None
    if response.status_code != 200:
        raise JaxserveError(f"{url}/metrics answers with HTTP {response.status_code}: {response.text[:200]}")
    try:
        sample = parse(response.text)
    except ValueError:  # some other page
        sample = Sample(0.0, {})
    if PREFIX + "num_requests_running" not in sample.values:
        raise JaxserveError(f"{url}/metrics has no metrics of jaxserve.")
    return sample


def parse(text: str) -> Sample:
    """Metrics in Prometheus' text format."""
    values: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return Sample(time.monotonic(), values)


@dataclass
class History:
    """The last two samples, and the course of what is drawn."""

    last: Sample
    before: Sample | None = None
    rates: deque[float] = field(default_factory=lambda: deque[float](maxlen=HISTORY))
    """Output tokens a second."""
    running: deque[float] = field(default_factory=lambda: deque[float](maxlen=HISTORY))

    def add(self, sample: Sample) -> None:
        """Take the next sample."""
        self.before, self.last = self.last, sample
        self.rates.append(self.rate("generation_tokens_total"))
        self.running.append(sample.total("num_requests_running"))

    def rate(self, name: str, **labels: str) -> float:
        """Growth a second of a counter since the sample before; 0 after the server was restarted."""
        if self.before is None:
            return 0.0
        seconds = max(1e-9, self.last.time - self.before.time)
        return max(0.0, self.last.total(name, **labels) - self.before.total(name, **labels)) / seconds

    def quantile(self, name: str, share: float) -> float | None:
        """A quantile of what a histogram took since the sample before, in its unit; None if that was nothing."""
        now = self.last.by(name + "_bucket", "le")
        then = {} if self.before is None else self.before.by(name + "_bucket", "le")
        counts = [(float(bound), count - then.get(bound, 0.0)) for bound, count in now.items()]
        return quantile(sorted(counts), share)


def quantile(counts: Sequence[tuple[float, float]], share: float) -> float | None:
    """The quantile of cumulative counts by upper bound, interpolated as Prometheus does; None without counts."""
    if not counts or counts[-1][1] <= 0:
        return None
    wanted = share * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf") or count == below:
                return low
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


# --- the picture ----------------------------------------------------------------------------------------------


def picture(history: History, url: str, columns: int, *, styled: bool, trouble: str = "") -> list[str]:
    """The lines to show, none wider than ``columns``.

    Args:
        history: what is known.
        url: the server.
        columns: of the terminal.
        styled: with escape sequences.
        trouble: why there is nothing new.
    """
    width = max(40, min(columns, 120))
    last = history.last
    lines = [_head(history, url), ""]
    lines += [f"requests   running {last.total('num_requests_running'):.0f}   waiting {_waiting(last)}"]
    lines += [_curve("", history.running, width)]
    tokens = history.rate("generation_tokens_total")
    prompt = history.rate("prompt_tokens_by_source_total", source="local_compute")
    found = history.rate("prompt_tokens_by_source_total", source="local_cache_hit")
    lines += [f"tokens/s   output {tokens:,.0f}   prompt {prompt:,.0f}   prompt from cache {found:,.0f}"]
    lines += [_curve("", history.rates, width), ""]
    lines += _latencies(history)
    lines += ["", _cache(history, width), _steps(history), _finished(history)]
    if trouble:
        lines += ["", f"! {trouble}"]
    if styled:
        lines += ["", "q quits"]
    cut = [line[:width].rstrip() for line in lines]
    return [_styled(line, index) for index, line in enumerate(cut)] if styled else cut


def _styled(line: str, index: int) -> str:
    if index == 0 or line.startswith("!"):
        return f"{BOLD}{line}{RESET}"
    return f"{DIM}{line}{RESET}" if line == "q quits" or line.endswith("p99") else line


def _head(history: History, url: str) -> str:
    models = [name for name in history.last.by("num_requests_running", "model_name") if name]
    return f"jaxserve top   {', '.join(models)}   {url}   {time.strftime('%H:%M:%S')}"


def _waiting(last: Sample) -> str:
    deferred = last.total("num_requests_waiting_by_reason", reason="deferred")
    total = f"{last.total('num_requests_waiting'):.0f}"
    return f"{total} ({deferred:.0f} for a grammar)" if deferred else total


def _curve(name: str, values: Sequence[float], width: int) -> str:
    """The last values as bars, the highest one a full bar."""
    room = width - 11 - 10
    shown = list(values)[-room:]
    highest = max(shown, default=0.0)
    bars = "".join(BARS[round(value / highest * (len(BARS) - 1))] if highest else BARS[0] for value in shown)
    return f"{name:11}{bars:{room}} max {highest:,.0f}" if highest else f"{name:11}"


def _latencies(history: History) -> list[str]:
    rows = (
        ("first token", "time_to_first_token_seconds"),
        ("between tokens", "inter_token_latency_seconds"),
        ("end to end", "e2e_request_latency_seconds"),
        ("waiting", "request_queue_time_seconds"),
        ("step, device", "step_device_seconds"),
        ("step, host", "step_host_seconds"),
    )
    lines = [f"{'latency':16}{'p50':>10}{'p90':>10}{'p99':>10}"]
    for title, name in rows:
        cells = [_seconds(history.quantile(name, share)) for share in (0.5, 0.9, 0.99)]
        lines.append(f"{title:16}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _cache(history: History, width: int) -> str:
    used = history.last.total("kv_cache_usage_perc")
    room = max(8, min(30, width - 50))
    full = min(room, round(used * room))
    queries = history.rate("prefix_cache_queries_total")
    hits = history.rate("prefix_cache_hits_total")
    rate = f"   prefix hits {hits / queries:.0%}" if queries else ""
    return f"KV cache   [{'#' * full}{'.' * (room - full)}] {used:6.1%}{rate}"


def _steps(history: History) -> str:
    steps = history.rate("iteration_tokens_total_count")
    tokens = history.rate("iteration_tokens_total_sum")
    padding = history.rate("padding_tokens_total")
    text = f"steps/s    {steps:,.1f}"
    if steps:
        text += (
            f"   tokens a step {tokens / steps:,.1f}   padding {padding / max(1e-9, tokens + padding):.0%}"
        )
    compiled = history.last.total("compilations_total")
    return text + (f"   COMPILED {compiled:.0f} WHILE SERVING" if compiled else "")


def _finished(history: History) -> str:
    reasons = history.last.by("request_success_total", "finished_reason")
    parts = [f"{reason} {count:,.0f}" for reason, count in sorted(reasons.items()) if count]
    preempted = history.last.total("num_preemptions_total")
    return f"finished   {'   '.join(parts) or 'none'}" + (
        f"   preempted {preempted:,.0f}" if preempted else ""
    )

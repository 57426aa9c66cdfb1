"""Cases on an accelerator, each in a process that its own failure alone can end: nothing a case does hides another's.

A fault of a kernel (a bad address, say) ends the process' CUDA context, and every later case there would fail too or
take the process down. So cases are handed out one by one to processes that print a line for each; whoever fails in any
way but a wrong result is replaced, and what it wrote is the case's report.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = "\x1eDONE "
"""Begins the line that ends a case, before its JSON."""


@dataclass
class Report:
    """How a case ended: ``error`` is None where it is right."""

    error: str | None
    output: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.error or 'right'}\n{self.output}".rstrip()


def serve_cases(check: Callable[[str], str], names: Sequence[str] = ()) -> int:
    """Check the cases named on the command line, or those that come by standard input, one a line.

    Args:
        check: one case; returns what to say of it, raises AssertionError where its result is wrong.

    Returns:
        An exit status: 1 after a case that was not right. Anything but a wrong result ends the process.
    """
    status = 0
    for name in names or map(str.strip, iter(sys.stdin.readline, "")):
        error, spoilt = None, False
        try:
            print(f"{name}: {check(name)}", flush=True)
        except Exception as failure:
            error, spoilt = (
                "".join(traceback.format_exception(failure)),
                not isinstance(failure, AssertionError),
            )
        done = DONE + json.dumps({"error": error, "ends": spoilt})
        print(f"{name}: {error or 'right'}" if names else done, flush=True)
        status = status or int(error is not None)
        if spoilt:
            return 1
    return status


@dataclass
class _Worker:
    """A process and what it printed of the case it has."""

    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[str] | None = None
    lines: list[str] = field(default_factory=list)

    def run(self, name: str, seconds: float) -> Report:
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, env=dict(self.environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1,
            )  # fmt: skip
        process, self.lines, overdue = self.process, [], threading.Event()
        assert process.stdin is not None

        def stop() -> None:
            overdue.set()
            process.kill()

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone already; what it wrote says why
        done = self._read()
        timer.cancel()
        output = "\n".join(self.lines)
        if done is not None:
            if done["ends"]:
                self.close()
            return Report(done["error"], output)
        code = process.wait()
        self.process = None
        why = (
            f"hung: stopped after {seconds:g} s"
            if overdue.is_set()
            else f"the process ended with {ending(code)}"
        )
        return Report(why, output)

    def _read(self) -> dict[str, Any] | None:
        """Keep its output up to what it says at a case's end; None where the process ended first."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(DONE):
                return json.loads(line.removeprefix(DONE))
            self.lines.append(line.rstrip("\n"))
        return None

    def close(self) -> None:
        """Let it end; at a spoilt device it may not."""
        if self.process is None:
            return
        try:
            self.process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self.process = None


def ending(code: int) -> str:
    return f"status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def run_cases(
    command: Sequence[str], names: Sequence[str], environment: Mapping[str, str], *, processes: int, seconds: float
) -> dict[str, Report]:  # fmt: skip
    """Every case's report.

    Args:
        command: starts a process that calls ``serve_cases``.
        processes: how many at a time.
        seconds: a case may take, the start of its process included.
    """
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        left.put(name)
    reports: dict[str, Report] = {}

    def work() -> None:
        worker = _Worker(command, environment)
        while True:
            try:
                name = left.get_nowait()
            except queue.Empty:
                break
            began = time.monotonic()
            reports[name] = worker.run(name, seconds)
            reports[name].seconds = time.monotonic() - began
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(processes, len(names)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports

"""A server process over a FakeEngine that has a process of its own, as the real engine does.

    python fake_server.py '{"port": 8000, "shutdown_timeout": 1, "step_seconds": 0.01, "load_seconds": 0}'

Prints the pid of the engine's process. A request whose prompt is ``die`` kills the engine.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from fake_engine import FakeEngine, FakeStream  # noqa: E402

from jaxserve.cli.main import main  # noqa: E402
from jaxserve.config import ServerConfig  # noqa: E402
from jaxserve.logs import configure_logging  # noqa: E402
from jaxserve.server.run import run_server  # noqa: E402


class EngineWithProcess(FakeEngine):
    """A fake engine whose core is a process that does nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        self._core.start()
        print(self._core.pid, flush=True)

    async def add_request(self, prompt: Any, *args: Any, **options: Any) -> FakeStream:
        stream = await super().add_request(prompt, *args, **options)
        if prompt == "die":
            self.die("the core was killed")
        return stream

    def shutdown(self) -> None:
        self._core.kill()
        self._core.join()


def serve(options: dict[str, Any]) -> int:
    configure_logging("info")

    def start_engine() -> EngineWithProcess:
        engine = EngineWithProcess(max_model_len=1 << 20, step_seconds=options.get("step_seconds", 0.01))
        try:
            time.sleep(options.get("load_seconds", 0))
        except BaseException:
            engine.shutdown()
            raise
        return engine

    config = ServerConfig(
        port=options["port"],
        shutdown_timeout=options.get("shutdown_timeout", 5.0),
        enable_server_load_tracking=True,
    )
    return run_server(start_engine, config, ["m"])


if __name__ == "__main__":
    # The command line's own handling of errors, with the command replaced.
    command = types.ModuleType("fake_serve")
    command.add_arguments = lambda parser: parser.add_argument("options", type=json.loads)  # type: ignore[attr-defined]
    command.run = lambda arguments: serve(arguments.options)  # type: ignore[attr-defined]
    sys.modules["jaxserve.cli.serve"] = command
    sys.exit(main(["serve", sys.argv[1]]))

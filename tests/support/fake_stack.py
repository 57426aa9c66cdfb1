"""A whole server but for the device: HTTP, AsyncEngine, ZMQ, and an engine core in its own process with a FakeRunner.

    python fake_stack.py '{"model": "TINY CHECKPOINT", "server": {"port": 8000}, "engine": {}, "runner": {}}'

``server`` and ``engine`` are fields of ServerConfig and EngineConfig, ``runner`` arguments of FakeRunner.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
sys.path[:0] = [str(ROOT), str(SUPPORT)]

from jaxserve.config import EngineConfig, ServerConfig  # noqa: E402
from jaxserve.engine.async_engine import AsyncEngine  # noqa: E402
from jaxserve.engine.core_client import CoreClient  # noqa: E402
from jaxserve.engine.front import Front  # noqa: E402
from jaxserve.logs import configure_logging  # noqa: E402
from jaxserve.server.run import run_server  # noqa: E402
from jaxserve.server.supervisor import run_servers  # noqa: E402


class FakeCoreClient(CoreClient):
    """Starts a core with a FakeRunner."""

    module = "fake_core_process"


def start_engine(config: EngineConfig) -> AsyncEngine:
    client = FakeCoreClient()
    try:
        client.start(config)
        return AsyncEngine(config, client, Front.load(config.model_config), client.wait_ready())
    except BaseException:
        client.kill()
        raise


def serve(options: dict[str, Any]) -> int:
    engine: dict[str, Any] = {"model": options["model"], "load_format": "dummy", "log_level": "warning"}
    config = EngineConfig.from_kwargs(**{**engine, **options.get("engine", {})})
    server = replace(ServerConfig(), **options.get("server", {}))
    configure_logging(config.compilation_config.log_level, config.observability_config.log_format)
    os.environ["FAKE_RUNNER"] = json.dumps(options.get("runner", {}))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SUPPORT)])
    if server.api_server_count > 1:
        return run_servers(config, server, ["fake"], core_client=FakeCoreClient)
    return run_server(lambda: start_engine(config), server, ["fake"])


if __name__ == "__main__":
    sys.exit(serve(json.loads(sys.argv[1])))

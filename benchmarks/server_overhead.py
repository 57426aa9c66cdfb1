"""What the HTTP server costs per streamed token, without a model: CPU time of the server process.

A server over the tests' FakeEngine, which gives every stream one token a step, runs in its own process;
this process reads the streams over plain sockets. Printed per number of streams: tokens/s through HTTP,
microseconds of server CPU time per token, and what of it the fake engine takes (measured without HTTP).

    python benchmarks/server_overhead.py --streams 32 64 128 256
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
import urllib.request
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests" / "support")]

from fake_engine import FakeEngine  # noqa: E402

from jaxserve.config import ServerConfig  # noqa: E402
from jaxserve.logs import configure_logging  # noqa: E402
from jaxserve.sampling_params import RequestOutputKind, SamplingParams  # noqa: E402
from jaxserve.server.run import bind_socket, run_server  # noqa: E402


def run_fake_server(port: int) -> None:
    configure_logging("warning")
    sys.exit(run_server(lambda: FakeEngine(max_model_len=1 << 20), ServerConfig(port=port), ["fake"]))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read_stream(port: int, path: str, body: dict[str, object]) -> int:
    """Post ``body`` and read its events to the end; the number of data events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    events = 0
    tail = b""
    while b"[DONE]" not in tail:
        chunk = await reader.read(1 << 16)
        if not chunk:
            raise ConnectionError("the server closed the stream")
        events += chunk.count(b"data: ")
        tail = (tail + chunk)[-32:]
    writer.close()
    return events


async def load(port: int, streams: int, tokens: int, chat: bool) -> tuple[int, float]:
    """Events received and seconds for ``streams`` concurrent streams of ``tokens`` tokens."""
    body: dict[str, object] = {"stream": True, "max_tokens": tokens}
    if chat:
        path, prompt = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}
    else:
        path, prompt = "/v1/completions", {"prompt": "hello"}
    began = time.perf_counter()
    counts = await asyncio.gather(*(read_stream(port, path, {**body, **prompt}) for _ in range(streams)))
    return sum(counts), time.perf_counter() - began


async def engine_alone(streams: int, tokens: int) -> float:
    """Microseconds of CPU time per token of the fake engine and its readers, without HTTP."""
    engine = FakeEngine(max_model_len=1 << 20)
    params = SamplingParams(max_tokens=tokens, output_kind=RequestOutputKind.DELTA)
    began = time.process_time()

    async def read(index: int) -> None:
        async for _ in await engine.add_request("hello", params, request_id=str(index)):
            pass

    await asyncio.gather(*(read(index) for index in range(streams)))
    return (time.process_time() - began) / (streams * tokens) * 1e6


def wait_until_ready(port: int) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--tokens", type=int, default=40_000, help="tokens in all, per line")
    parser.add_argument("--completions", action="store_true", help="/v1/completions instead of chat")
    arguments = parser.parse_args()

    with bind_socket("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=run_fake_server, args=(port,))
    server.start()
    assert server.pid is not None
    try:
        wait_until_ready(port)
        asyncio.run(load(port, 8, 50, not arguments.completions))
        heads = ("streams", "tokens/s", "events/token", "server us/token", "engine alone", "HTTP us/token")
        print(" ".join(f"{head:>15}" for head in heads))
        for streams in arguments.streams:
            tokens = max(1, arguments.tokens // streams)
            before = cpu_seconds(server.pid)
            events, seconds = asyncio.run(load(port, streams, tokens, not arguments.completions))
            total = streams * tokens
            cost = (cpu_seconds(server.pid) - before) / total * 1e6
            alone = asyncio.run(engine_alone(streams, tokens))
            cells = (total / seconds, events / total, cost, alone, cost - alone)
            print(f"{streams:15} " + " ".join(f"{cell:15.1f}" for cell in cells))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()

"""What the server bears, without a model: many open streams, clients that vanish, good and malicious requests.

The whole server runs (HTTP, engine front, ZMQ, scheduler) but for the device: a fake runner gives every running
request a token a step. This process is the clients.

    python benchmarks/streams.py streams [--streams 1000] [--seconds 600] [--api-servers 1]
    python benchmarks/streams.py vanish  [--clients 500]
    python benchmarks/streams.py soak    [--seconds 600]

Targets: 1,000 streams at 8,000 tokens/s or more, memory flat; nothing left behind by clients that vanish; a soak that
ends with the pool full of free blocks and memory flat. With ``--check`` the exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import httpx  # noqa: E402
from server_process import ServerProcess, server_process  # noqa: E402
from tiny_checkpoints import write_tiny_checkpoint  # noqa: E402

TARGET_TOKENS_PER_SECOND = 8000
FLAT_SHARE, FLAT_MIB = 1.05, 16
"""How much the last third of the memory samples may lie above the second."""
NUM_BLOCKS = 20_000
CHAT = "/v1/chat/completions"


# --- clients -----------------------------------------------------------------------------------------------


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chat_body(max_tokens: int, **more: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": max_tokens, **more}
    return json.dumps(body).encode()


class Counter:
    """Events read so far."""

    def __init__(self) -> None:
        self.events = 0


async def read_stream(port: int, max_tokens: int, counter: Counter) -> None:
    """One stream to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 17)
    try:
        writer.write(post(CHAT, chat_body(max_tokens, stream=True, ignore_eos=True)))
        tail = b""
        while b"[DONE]" not in tail:
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionError(f"a stream broke off after {tail!r}")
            counter.events += data.count(b"data: ")
            tail = (tail + data)[-64:]
    finally:
        writer.close()


# --- memory ------------------------------------------------------------------------------------------------


async def sample_memory(server: ServerProcess, samples: list[float], interval: float) -> None:
    while True:
        samples.append(server.rss_mib())
        await asyncio.sleep(interval)


async def sample_latency(server: ServerProcess, samples: list[float], interval: float) -> None:
    """Seconds until /health answers; 30 where it did not."""
    while True:
        began = time.monotonic()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(30):
                await exchange(server.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        samples.append(time.monotonic() - began)
        await asyncio.sleep(interval)


async def sample_open(server: ServerProcess, samples: list[float], interval: float) -> None:
    """How many streams are open: requests whose answer is not all sent."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            load = await asyncio.to_thread(httpx.get, server.url + "/load", timeout=60)
            samples.append(load.json()["server_load"])
        await asyncio.sleep(interval)


def flat(samples: list[float]) -> tuple[bool, str]:
    """Whether memory has stopped to grow, and its course."""
    third = max(1, len(samples) // 3)
    middle, last = (
        statistics.median(samples[third : 2 * third] or samples),
        statistics.median(samples[-third:]),
    )
    course = f"{samples[0]:.0f} MiB at first, {middle:.0f} in the middle, {last:.0f} at last"
    return last <= middle * FLAT_SHARE + FLAT_MIB, course


async def nothing_left(server: ServerProcess, seconds: float = 30) -> tuple[bool, str]:
    """Whether requests, blocks and the server's load come back to nothing."""
    end = time.monotonic() + seconds
    while True:
        values = await asyncio.to_thread(server.metrics)
        running, waiting = values["jaxserve:num_requests_running"], values["jaxserve:num_requests_waiting"]
        usage = values["jaxserve:kv_cache_usage_perc"]
        clean = running == waiting == usage == 0
        if clean or time.monotonic() > end:
            return clean, f"{running:.0f} running, {waiting:.0f} waiting, cache use {usage:.4f}"
        await asyncio.sleep(0.2)


# --- the three ---------------------------------------------------------------------------------------------


async def run_streams(server: ServerProcess, arguments: argparse.Namespace) -> bool:
    """Hold so many streams open for so long; one that ends is begun anew."""
    counter, samples = Counter(), list[float]()
    end = time.monotonic() + arguments.seconds

    async def keep_open(index: int) -> None:
        await asyncio.sleep(index / 500)
        rng = random.Random(index)
        while time.monotonic() < end:
            await read_stream(server.port, rng.randint(200, 2000), counter)

    memory = asyncio.create_task(sample_memory(server, samples, 1.0))
    streams = [asyncio.create_task(keep_open(index)) for index in range(arguments.streams)]
    await asyncio.sleep(min(10, arguments.seconds / 3))
    began, events, used = time.monotonic(), counter.events, cpu_seconds(server)
    tokens = (await asyncio.to_thread(server.metrics))["jaxserve:generation_tokens_total"]
    batch = list[float]()
    sampling = asyncio.create_task(sample_open(server, batch, 5.0))
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    sampling.cancel()
    running = statistics.median(batch)
    seconds = time.monotonic() - began
    rate = ((await asyncio.to_thread(server.metrics))["jaxserve:generation_tokens_total"] - tokens) / seconds
    event_rate, cpu = (counter.events - events) / seconds, cpu_seconds(server) - used
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    broken = [task for task in streams if not task.cancelled() and task.exception()]
    memory.cancel()
    level, course = flat(samples)
    clean, left = await nothing_left(server)
    return table(
        (
            f"{arguments.streams} streams, {seconds:.0f} s",
            f"{running:.0f} open at once (median)",
            running >= arguments.streams * 0.9,
        ),
        ("tokens/s", f"{rate:,.0f} ({event_rate:,.0f} events/s)", rate >= TARGET_TOKENS_PER_SECOND),
        ("server CPU", f"{cpu / seconds:.2f} cores, {cpu / max(1, rate * seconds) * 1e6:.0f} us/token", None),
        ("broken streams", str(len(broken)), not broken),
        ("memory", course, level),
        ("left behind", left, clean),
    )


async def run_vanish(server: ServerProcess, arguments: argparse.Namespace) -> bool:
    """Clients that close their connections in the middle of a request, a stream, or the reading of it."""
    before = server.rss_mib()

    async def vanish(index: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        request = post(CHAT, chat_body(3000, stream=index % 2 == 0, ignore_eos=True))
        writer.write(request[: -1 - index % 40] if index % 5 == 4 else request)
        if index % 2 == 0 and index % 5 != 4:
            await reader.readuntil(b"data: ")
        await asyncio.sleep(random.random() / 2)
        writer.transport.abort() if index % 3 else writer.close()

    results = await asyncio.gather(*(vanish(i) for i in range(arguments.clients)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, Exception)]
    clean, left = await nothing_left(server)
    values = server.metrics()
    sockets = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in server.pids())
    counter = Counter()
    await read_stream(server.port, 5, counter)
    return table(
        (f"{arguments.clients} clients", f"{len(refused)} found no server", not refused),
        ("left behind", left, clean),
        ("open files", f"{sockets} in all processes", sockets < 200),
        ("memory", f"{before:.0f} MiB before, {server.rss_mib():.0f} after", None),
        ("requests that ended", f"{values['jaxserve:request_success_total']:.0f}", None),
        ("answers afterwards", f"{counter.events} events", counter.events > 1),
    )


async def run_soak(server: ServerProcess, arguments: argparse.Namespace) -> bool:
    """Good and malicious requests, mixed, for so long."""
    counts: dict[str, int] = {}
    samples = list[float]()
    end = time.monotonic() + arguments.seconds
    wrong: list[str] = []

    async def client(index: int) -> None:
        rng = random.Random(index)
        while time.monotonic() < end:
            name, act = rng.choice(ACTS)
            try:
                async with asyncio.timeout(60):
                    status = await act(server.port, rng)
            except (OSError, asyncio.LimitOverrunError) as error:
                status = type(error).__name__
            counts[f"{name}: {status}"] = counts.get(f"{name}: {status}", 0) + 1
            if status == "TimeoutError" or str(status).startswith("5"):
                wrong.append(f"{name}: {status}")

    memory = asyncio.create_task(sample_memory(server, samples, 1.0))
    latencies = list[float]()
    probing = asyncio.create_task(sample_latency(server, latencies, 1.0))
    await asyncio.gather(*(client(index) for index in range(arguments.clients or 32)))
    memory.cancel()
    probing.cancel()
    for name, count in sorted(counts.items()):
        print(f"  {count:8,} {name}")
    print(
        f"  /health: {statistics.median(latencies):.3f} s in the middle, {max(latencies):.2f} s at most",
        flush=True,
    )
    clean, left = await nothing_left(server)
    level, course = flat(samples)
    good = Counter()
    await read_stream(server.port, 5, good)
    return table(
        (f"{sum(counts.values()):,} requests, {arguments.seconds} s", "", None),
        ("5xx or no answer", str(len(wrong)), not wrong),
        ("pool", left, clean),
        ("memory", course, level),
        ("answers afterwards", f"{good.events} events", good.events > 1),
    )


# --- what clients of the soak do -----------------------------------------------------------------------------

Act = Callable[[int, random.Random], Awaitable[str]]


async def exchange(port: int, request: bytes) -> str:
    """The answer's status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.split(b" ", 2)[1].decode()
        length = next((x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")), None)
        if length is not None:
            await reader.readexactly(int(length.split(b":")[1]))
        return status
    except asyncio.IncompleteReadError:
        return "closed"
    finally:
        writer.close()


async def good_chat(port: int, rng: random.Random) -> str:
    return await exchange(port, post(CHAT, chat_body(rng.randint(1, 60), temperature=rng.random())))


async def good_stream(port: int, rng: random.Random) -> str:
    await read_stream(port, rng.randint(1, 100), Counter())
    return "200"


async def good_completion(port: int, rng: random.Random) -> str:
    prompts = ["x" * rng.randint(1, 400) for _ in range(rng.randint(1, 8))]
    body = {
        "prompt": prompts,
        "n": rng.randint(1, 3),
        "max_tokens": rng.randint(1, 20),
        "logprobs": 2,
        "seed": 1,
    }
    return await exchange(port, post("/v1/completions", json.dumps(body).encode()))


async def wrong_type(port: int, rng: random.Random) -> str:
    field = rng.choice(
        ["n", "max_tokens", "temperature", "stop", "logit_bias", "messages", "stream", "seed", "tools"]
    )
    value = rng.choice([-1, 1e308, "x", [], {}, [[]], True, "x" * 5000, 2**70])
    body = {**json.loads(chat_body(3)), field: value}
    return await exchange(port, post(CHAT, json.dumps(body).encode()))


async def rubbish(port: int, rng: random.Random) -> str:
    return await exchange(port, post(CHAT, rng.randbytes(rng.randint(0, 2000))))


async def deep(port: int, rng: random.Random) -> str:
    depth = rng.choice([60, 1000, 100_000])
    return await exchange(port, post(CHAT, b'{"messages":' + b"[" * depth + b"]" * depth + b"}"))


async def huge(port: int, rng: random.Random) -> str:
    return await exchange(
        port, post("/v1/completions", b'{"prompt": "' + b"x" * rng.choice([10**6, 34 << 20]) + b'"}')
    )


async def many_choices(port: int, rng: random.Random) -> str:
    body = {"prompt": [1, 2, 3], "n": rng.choice([500, 10**5]), "max_tokens": 1, "temperature": 1}
    return await exchange(port, post("/v1/completions", json.dumps(body).encode()))


async def not_http(port: int, rng: random.Random) -> str:
    return await exchange(port, rng.randbytes(200) + b"\r\n\r\n")


async def slow_reader(port: int, rng: random.Random) -> str:
    """Asks for much, reads nothing for a while, and goes."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(CHAT, chat_body(2000, stream=True, ignore_eos=True)))
    await asyncio.sleep(rng.random() * 2)
    writer.transport.abort()
    return "left"


async def half_a_request(port: int, rng: random.Random) -> str:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    request = post(CHAT, chat_body(20))
    writer.write(request[: rng.randint(1, len(request) - 1)])
    await asyncio.sleep(rng.random() / 4)
    writer.close()
    return "left"


ACTS: list[tuple[str, Act]] = [
    ("chat", good_chat), ("chat", good_chat), ("stream", good_stream), ("stream", good_stream),
    ("completion", good_completion), ("wrong type", wrong_type), ("rubbish", rubbish), ("deep", deep), ("huge", huge),
    ("many choices", many_choices), ("not HTTP", not_http), ("slow reader", slow_reader), ("half", half_a_request),
]  # fmt: skip


# --- ---------------------------------------------------------------------------------------------------------


def cpu_seconds(server: ServerProcess) -> float:
    ticks = 0
    for pid in server.pids():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def table(*rows: tuple[str, str, bool | None]) -> bool:
    """Print the rows, each with whether its target is met. Whether all are."""
    for name, value, met in rows:
        verdict = "" if met is None else ("met" if met else "MISSED")
        print(f"{name:28} {value:70} {verdict}", flush=True)
    return all(met is not False for _, _, met in rows)


RUNS = {"streams": run_streams, "vanish": run_vanish, "soak": run_soak}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--streams", type=int, default=1000, metavar="N")
    parser.add_argument("--clients", type=int, metavar="N", help="default: 500 that vanish, 32 of the soak")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--api-servers", type=int, default=1, metavar="N")
    parser.add_argument(
        "--step-seconds", type=float, default=0.05, help="of the fake device (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args()
    if arguments.run == "vanish":
        arguments.clients = arguments.clients or 500
    print(f"Load average at the beginning: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "engine": {"max_num_seqs": 1024, "max_num_batched_tokens": 2048, "max_model_len": 4096},
            "runner": {
                "num_blocks": NUM_BLOCKS,
                "step_seconds": arguments.step_seconds,
                "max_model_len": 4096,
            },
            "server": {"api_server_count": arguments.api_servers, "enable_server_load_tracking": True},
        }
        with server_process(write_tiny_checkpoint(Path(folder) / "llama"), **options) as server:
            met = asyncio.run(RUNS[arguments.run](server, arguments))
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())

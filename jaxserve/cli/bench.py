"""``jaxserve bench serve|throughput|latency|startup|sweep``: measure, with vLLM's flags and result keys."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import json
import uuid
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, cast

from jaxserve.bench.dataset import DATASETS, DatasetConfig
from jaxserve.bench.plot import check_matplotlib, write_html, write_png
from jaxserve.bench.report import ReportConfig, parse_goodput
from jaxserve.bench.serve import ServeBenchmark, ServeConfig, result_path, save_result
from jaxserve.bench.sweep import Curve
from jaxserve.bench.traffic import Traffic
from jaxserve.cli.client import environment_key
from jaxserve.cli.serve import PACKAGED_MODEL_NAME
from jaxserve.config import ENGINE_CONFIGS, EngineConfig
from jaxserve.config.cli_flags import add_config_flags, flags_given
from jaxserve.errors import ConfigError
from jaxserve.logs import configure_logging
from jaxserve.tokenizer.interface import Tokenizer
from jaxserve.tokenizer.load import load_tokenizer
from jaxserve.weights.resolve import resolve_model

BACKENDS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""A backend and its endpoint."""
SAMPLING_FLAGS = {
    "top-p": float, "top-k": int, "min-p": float, "temperature": float, "frequency-penalty": float,
    "presence-penalty": float, "repetition-penalty": float,
}  # fmt: skip
"""Sampling parameters that go into every request's body."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(metavar="WHAT", required=True)
    for name, (description, add, run) in BENCHMARKS.items():
        sub = subparsers.add_parser(name, help=description, description=description, allow_abbrev=False)
        add(sub)
        sub.set_defaults(run_benchmark=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that is named."""
    return arguments.run_benchmark(arguments)


# --- serve ----------------------------------------------------------------------------------------------------


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    add_dataset_arguments(parser)
    parser.add_argument(
        "--request-rate", type=float, default=inf, help="requests a second (default: all at once)"
    )
    parser.add_argument("--max-concurrency", type=int, help="requests in flight at most (default: no limit)")
    parser.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow")
    parser.add_argument("--ramp-up-start-rps", type=float, help="the rate it grows from")
    parser.add_argument("--ramp-up-end-rps", type=float, help="the rate it grows to")
    parser.add_argument(
        "--profile", action="store_true", help="/start_profile before the run, /stop_profile after it"
    )
    parser.add_argument("--save-result", action="store_true", help="write the results as JSON")
    parser.add_argument(
        "--save-detailed", action="store_true", help="keep times, lengths and texts of each request"
    )
    parser.add_argument(
        "--append-result", action="store_true", help="add the results to the file, a line a run"
    )


def run_serve(arguments: argparse.Namespace) -> int:
    """Run once against a server."""
    traffic = Traffic(
        arguments.request_rate, arguments.burstiness, arguments.max_concurrency, arguments.ramp_up_strategy,
        arguments.ramp_up_start_rps, arguments.ramp_up_end_rps,
    )  # fmt: skip
    benchmark = serve_benchmark(arguments, profile=arguments.profile)

    async def measure() -> dict[str, Any]:
        async with benchmark:
            return await benchmark.run(traffic)

    result = run_in_loop(measure)
    if arguments.save_result or arguments.append_result:
        path = result_path(result, arguments.result_dir, arguments.result_filename)
        save_result(result, path, detailed=arguments.save_detailed, append=arguments.append_result)
        print(f"Results: {path}")
    return 0


def serve_benchmark(arguments: argparse.Namespace, *, profile: bool = False) -> ServeBenchmark:
    """The benchmark that the flags of ``add_server_arguments`` and ``add_dataset_arguments`` describe.

    Raises:
        ConfigError: a flag cannot be honoured.
    """
    endpoint = arguments.endpoint or BACKENDS[arguments.backend]
    config = ServeConfig(
        base_url=arguments.base_url or f"http://{_bracketed(arguments.host)}:{arguments.port}",
        endpoint=endpoint,
        backend=arguments.backend,
        model=arguments.model,
        served_model_name=arguments.served_model_name,
        tokenizer=arguments.tokenizer,
        skip_tokenizer=arguments.skip_tokenizer_init,
        headers=_headers(arguments.header),
        verify=not arguments.insecure,
        extra_body=_sampling(arguments) | (arguments.extra_body or {}),
        ignore_eos=arguments.ignore_eos,
        logprobs=arguments.logprobs,
        num_warmups=arguments.num_warmups,
        ready_seconds=arguments.ready_check_timeout_sec,
        request_id_prefix=arguments.request_id_prefix,
        profile=profile,
        progress=not arguments.disable_tqdm,
        label=arguments.label,
        metadata=dict(_pair(pair, "metadata") for pair in arguments.metadata),
    )
    if arguments.backend == "openai-chat" and not config.chat:
        raise ConfigError(
            f"backend openai-chat needs an endpoint that ends with /chat/completions, got {endpoint!r}.",
            param="endpoint",
        )
    report = ReportConfig(
        metrics=[name.strip() for name in arguments.percentile_metrics.split(",")],
        percentiles=_numbers(arguments.metric_percentiles, "metric_percentiles"),
        goodput=parse_goodput(arguments.goodput),
    )
    return ServeBenchmark(config, dataset_config(arguments), report, find_tokenizer)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say where requests go, what they hold, and what is reported."""
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", help="the server's address, without /v1")
    server.add_argument("--host", default="127.0.0.1", help="without --base-url (default: %(default)s)")
    server.add_argument("--port", type=int, default=8000, help="without --base-url (default: %(default)s)")
    server.add_argument(
        "--backend", choices=tuple(BACKENDS), default="openai", help="the API (default: %(default)s)"
    )
    server.add_argument("--endpoint", help="/v1/completions or /v1/chat/completions (default: the backend's)")
    server.add_argument("--model", help="the model's name (default: the first that the server names)")
    server.add_argument("--served-model-name", help="what requests call it, if not by its name")
    server.add_argument("--tokenizer", help="folder, GGUF file or hub id (default: the model's)")
    server.add_argument("--skip-tokenizer-init", action="store_true", help="random prompts are made of words")
    server.add_argument(
        "--header", nargs="*", default=[], metavar="KEY=VALUE", help="sent with every request"
    )
    server.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    server.add_argument(
        "--ready-check-timeout-sec", type=float, default=0, help="seconds to wait for the server"
    )
    server.add_argument("--num-warmups", type=int, default=0, help="requests before the run, not counted")
    body = parser.add_argument_group("requests")
    body.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction,
        help="ask for outputs of full length, an extension of OpenAI's API (default: for random prompts)",
    )  # fmt: skip
    body.add_argument(
        "--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier"
    )
    body.add_argument(
        "--extra-body", type=_json_object, metavar="JSON", help="fields of every request's body"
    )
    body.add_argument("--logprobs", type=int, metavar="N", help="log probabilities a token to ask for")
    body.add_argument(
        "--request-id-prefix",
        default=f"bench-{uuid.uuid4().hex[:8]}-",
        help="begins X-Request-Id; '' sends none",
    )
    for name, kind in SAMPLING_FLAGS.items():
        body.add_argument(f"--{name}", type=kind, help="sampling parameter (default: the server's)")
    results = parser.add_argument_group("results")
    results.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el",
        help="of ttft, tpot, itl, e2el, client_queue_time (default: %(default)s)",
    )  # fmt: skip
    results.add_argument("--metric-percentiles", default="99", help="such as 50,90,99 (default: %(default)s)")
    results.add_argument(
        "--goodput", nargs="+", default=[], metavar="KEY:MS", help="limits such as ttft:200 tpot:50 e2el:5000"
    )
    results.add_argument("--result-dir", help="folder of the results (default: the current one)")
    results.add_argument("--result-filename", help="name of the results' file")
    results.add_argument("--label", help="what the results are called by (default: the backend)")
    results.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="further fields of the results"
    )
    results.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


# --- workloads ------------------------------------------------------------------------------------------------


def add_dataset_arguments(parser: argparse.ArgumentParser, *, seed: bool = True) -> None:
    """The flags of a workload."""
    group = parser.add_argument_group("workload")
    default = DatasetConfig()
    group.add_argument(
        "--dataset-name", choices=DATASETS, default=default.name, help="(default: %(default)s)"
    )
    group.add_argument("--dataset-path", help="the file of sharegpt (JSON) and custom (JSONL)")
    group.add_argument("--num-prompts", type=int, default=default.num_prompts, help="(default: %(default)s)")
    if seed:
        group.add_argument(
            "--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)"
        )
    group.add_argument("--input-len", type=int, help="--random-input-len")
    group.add_argument("--output-len", type=int, help="the output length of any workload")
    group.add_argument(
        "--random-input-len", type=int, default=default.input_len, help="(default: %(default)s)"
    )
    group.add_argument(
        "--random-output-len", type=int, default=default.output_len, help="(default: %(default)s)"
    )
    group.add_argument(
        "--random-range-ratio", type=float, default=default.range_ratio,
        help="lengths are drawn from [len * (1 - ratio), len * (1 + ratio)] (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="tokens that all prompts begin with, added"
    )
    for name, value in (("prefix-len", default.shared_prefix_len), ("suffix-len", default.shared_suffix_len),
                        ("num-prefixes", default.num_prefixes), ("output-len", default.shared_output_len)):  # fmt: skip
        group.add_argument(
            f"--prefix-repetition-{name}", type=int, default=value, help="(default: %(default)s)"
        )
    group.add_argument("--sharegpt-output-len", type=int, help="(default: of each conversation's answer)")
    group.add_argument(
        "--custom-output-len", type=int, default=default.custom_output_len,
        help="where a line has no output_tokens; -1 asks every line to have it (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--skip-chat-template", action="store_true", help="custom prompts go to completions as they are"
    )
    group.add_argument("--no-oversample", action="store_true", help="do not repeat a file that holds too few")
    group.add_argument("--disable-shuffle", action="store_true", help="take a file's requests in order")


def dataset_config(arguments: argparse.Namespace) -> DatasetConfig:
    """The workload that the flags describe."""
    output_len = arguments.output_len
    return DatasetConfig(
        name=arguments.dataset_name,
        num_prompts=arguments.num_prompts,
        path=arguments.dataset_path,
        seed=getattr(arguments, "seed", 0),
        input_len=_first(arguments.input_len, arguments.random_input_len),
        output_len=_first(output_len, arguments.random_output_len),
        range_ratio=arguments.random_range_ratio,
        prefix_len=arguments.random_prefix_len,
        shared_prefix_len=arguments.prefix_repetition_prefix_len,
        shared_suffix_len=arguments.prefix_repetition_suffix_len,
        num_prefixes=arguments.prefix_repetition_num_prefixes,
        shared_output_len=_first(output_len, arguments.prefix_repetition_output_len),
        sharegpt_output_len=_first(output_len, arguments.sharegpt_output_len),
        custom_output_len=_first(output_len, arguments.custom_output_len),
        skip_chat_template=arguments.skip_chat_template,
        oversample=not arguments.no_oversample,
        shuffle=not arguments.disable_shuffle,
    )


def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model's name: a folder, a GGUF file, a hub id, or the packaged model's."""
    if name == PACKAGED_MODEL_NAME:
        name = ""
    if name and not Path(name).expanduser().exists():
        return load_tokenizer(name)
    files = resolve_model(name, weights=False)
    return load_tokenizer(files.path, files.format)


# --- offline --------------------------------------------------------------------------------------------------


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_arguments(parser, seed=False)
    add_offline_arguments(parser)


def run_throughput(arguments: argparse.Namespace) -> int:
    """Give ``LLM`` a whole workload."""
    from jaxserve.bench.offline import measure_throughput, print_throughput
    from jaxserve.engine.llm import LLM

    dataset = dataset_config(arguments)
    with LLM(**engine_arguments(arguments)) as llm:
        result = measure_throughput(
            llm, dataset, n=arguments.n, detokenize=not arguments.disable_detokenize,
            progress=not arguments.disable_tqdm,
        )  # fmt: skip
    print_throughput(result)
    return _write_json(arguments.output_json, result)


def add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=32, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts (default: %(default)s)")
    parser.add_argument("--num-iters", type=int, default=30, help="batches (default: %(default)s)")
    parser.add_argument(
        "--num-iters-warmup", type=int, default=10, help="batches before them (default: %(default)s)"
    )
    add_offline_arguments(parser)


def run_latency(arguments: argparse.Namespace) -> int:
    """Time one batch with ``LLM``."""
    from jaxserve.bench.offline import measure_latency, print_latency
    from jaxserve.engine.llm import LLM

    values = engine_arguments(arguments)
    with LLM(**values) as llm:
        result = measure_latency(
            llm, input_len=arguments.input_len, output_len=arguments.output_len, batch_size=arguments.batch_size,
            num_iters=arguments.num_iters, num_iters_warmup=arguments.num_iters_warmup, n=arguments.n,
            detokenize=not arguments.disable_detokenize, seed=values.get("seed", 0),
            progress=not arguments.disable_tqdm,
        )  # fmt: skip
    print_latency(result)
    return _write_json(arguments.output_json, result)


def add_offline_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of benchmarks that build an engine, with the engine's own."""
    parser.add_argument("--n", type=int, default=1, help="completions a prompt (default: %(default)s)")
    parser.add_argument(
        "--disable-detokenize", action="store_true", help="leave making text of the outputs out"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    parser.add_argument("--output-json", metavar="FILE", help="write the results as JSON")
    add_config_flags(parser, ENGINE_CONFIGS)


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's arguments that the flags give. As in vLLM, prefix caching is off unless it is asked for."""
    values: dict[str, Any] = {"enable_prefix_caching": False, **flags_given(ENGINE_CONFIGS, arguments)}
    configure_logging(values.get("log_level"), values.get("log_format"))
    EngineConfig.from_kwargs(**values)  # refuses what is wrong before anything is loaded
    return values


# --- startup --------------------------------------------------------------------------------------------------


def add_startup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-iters-cold", type=int, default=3, help="starts without compiled programs (default: 3)"
    )
    parser.add_argument(
        "--num-iters-warmup", type=int, default=1, help="starts before the warm ones (default: 1)"
    )
    parser.add_argument(
        "--num-iters-warm", type=int, default=3, help="starts with compiled programs (default: 3)"
    )
    parser.add_argument("--output-json", metavar="FILE", help="write the results as JSON")
    parser.add_argument("serve_flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="of jaxserve serve")


def run_startup(arguments: argparse.Namespace) -> int:
    """Time starts of ``jaxserve serve``."""
    from jaxserve.bench.startup import measure_startup

    for name in ("num_iters_cold", "num_iters_warmup", "num_iters_warm"):
        if getattr(arguments, name) < 0:
            raise ConfigError(f"{name} must be at least 0, got {getattr(arguments, name)}.", param=name)
    flags = [flag for index, flag in enumerate(arguments.serve_flags) if index or flag != "--"]
    result = measure_startup(
        flags, num_cold=arguments.num_iters_cold, num_warm=arguments.num_iters_warm,
        num_warmup=arguments.num_iters_warmup,
    )  # fmt: skip
    return _write_json(arguments.output_json, result)


# --- sweep ----------------------------------------------------------------------------------------------------


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep")
    group.add_argument("--request-rates", type=float, nargs="+", default=[], help="such as 1 2 4 8 inf")
    group.add_argument("--max-concurrencies", type=int, nargs="+", default=[], help="such as 1 4 16 64")
    group.add_argument("--max-concurrency", type=int, help="requests in flight at most, at every rate")
    group.add_argument(
        "--plot", nargs="+", metavar="FILE", help="only draw the results in these files, in one drawing"
    )
    group.add_argument("--png", metavar="FILE", help="(default: the results' name; needs matplotlib)")
    group.add_argument("--html", metavar="FILE", help="(default: the results' name)")
    add_server_arguments(parser)
    add_dataset_arguments(parser)


def run_sweep_command(arguments: argparse.Namespace) -> int:
    """Run a workload under several loads, or draw earlier runs."""
    from jaxserve.bench import sweep

    if arguments.png:
        check_matplotlib()  # not after an hour of measuring
    if arguments.plot:
        paths = [Path(path) for path in arguments.plot]
        _draw([sweep.read_curve(path) for path in paths], paths[0], arguments)
        return 0
    loads = sweep.sweep_traffic(
        arguments.request_rates, arguments.max_concurrencies, arguments.burstiness, arguments.max_concurrency
    )
    benchmark = serve_benchmark(arguments)
    name = arguments.label or arguments.backend
    default = f"sweep-{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path = Path(arguments.result_dir or ".") / (arguments.result_filename or default)
    # After each load: what is measured stays, whatever becomes of the next one.
    run_in_loop(
        lambda: sweep.run_sweep(benchmark, loads, lambda so_far: sweep.write_sweep(path, name, so_far))
    )
    print(f"\nResults: {path}")
    _draw([sweep.read_curve(path)], path, arguments)
    return 0


def _draw(curves: list[Curve], beside: Path, arguments: argparse.Namespace) -> None:
    page = Path(arguments.html or beside.with_suffix(".html"))
    write_html(curves, page)
    print(f"Drawing: {page}")
    picture = Path(arguments.png or beside.with_suffix(".png"))
    try:
        write_png(curves, picture)
    except ConfigError as error:
        if arguments.png:
            raise
        print(f"No PNG: {error}")
    else:
        print(f"Drawing: {picture}")


def _write_json(path: str | None, result: dict[str, Any]) -> int:
    if path is not None:
        file = Path(path).expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    return 0


# --- what the benchmarks share --------------------------------------------------------------------------------


def run_in_loop(main: Callable[[], Any]) -> Any:
    """Run a coroutine function in uvloop's event loop where it is installed."""
    try:
        factory: Any = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    """The headers given; without an authorization among them, the environment's key."""
    headers = {name.lower(): value for name, value in (_pair(pair, "header") for pair in pairs)}
    key = environment_key()
    if key and "authorization" not in headers:
        headers["authorization"] = f"Bearer {key}"
    return headers


def _pair(text: str, param: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{param} got {text!r}; it takes KEY=VALUE.", param=param)
    return name.strip(), value.strip()


def _numbers(text: str, param: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"{param} got {text!r}; it takes numbers with commas between them.", param=param
        ) from None


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    names = [name.replace("-", "_") for name in SAMPLING_FLAGS]
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return cast("dict[str, Any]", value)


BENCHMARKS: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
] = {
    "serve": ("Measure a running server.", add_serve_arguments, run_serve),
    "throughput": ("Measure offline generation of a workload.", add_throughput_arguments, run_throughput),
    "latency": ("Measure one batch, offline.", add_latency_arguments, run_latency),
    "startup": ("Measure starts of a server.", add_startup_arguments, run_startup),
    "sweep": (
        "Measure a server under several loads, and draw the curve.",
        add_sweep_arguments,
        run_sweep_command,
    ),
}
"""A benchmark's name, what it does, its flags and its code."""

"""A benchmark of a running server: the workload is made, sent and summarised. ``jaxserve bench serve``."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxserve.bench.dataset import DatasetConfig, make_requests
from jaxserve.bench.endpoint import BenchRequest, Endpoint, first_model
from jaxserve.bench.http_client import HTTPClient, ServerUnreachableError
from jaxserve.bench.report import DETAILS, ReportConfig, print_table, summarise
from jaxserve.bench.traffic import Traffic, send_all
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.tokenizer.interface import Tokenizer

CHAT_PATH = "chat/completions"
READY_POLL_SECONDS = 1.0

FindTokenizer = Callable[[str], Tokenizer]
"""The tokenizer of a model's or a folder's name; raises JaxserveError."""


@dataclass(frozen=True)
class ServeConfig:
    """Where the requests go and what is done with their figures.

    Args:
        base_url: the server, such as ``http://127.0.0.1:8000``.
        endpoint: a path that ends with ``/completions`` or ``/chat/completions``.
        backend: what results are called by.
        model: the name to ask for; None is the server's first.
        served_model_name: what requests call it, if that is something else.
        tokenizer: its name; None is the model's.
        skip_tokenizer: do without one.
        headers: sent with every request.
        verify: check certificates.
        extra_body: fields of every request's body.
        ignore_eos: None is true for random workloads.
        logprobs: log probabilities to ask for.
        num_warmups: requests before the run, not counted.
        ready_seconds: how long to wait for a server that does not answer yet.
        request_id_prefix: begins the X-Request-Id of every request; '' sends none.
        profile: have the server write a profile of the run.
        progress: show a bar, where there is a terminal.
        label: of the results.
        metadata: further fields of the results.
    """

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = "/v1/completions"
    backend: str = "openai"
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_tokenizer: bool = False
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    verify: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ignore_eos: bool | None = None
    logprobs: int | None = None
    num_warmups: int = 0
    ready_seconds: float = 0.0
    request_id_prefix: str = ""
    profile: bool = False
    progress: bool = True
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if not self.endpoint.startswith("/") or not self.endpoint.endswith("/completions"):
            raise ConfigError(
                f"endpoint is {self.endpoint!r}; it must be a path that ends with /completions or /chat/completions.",
                param="endpoint",
            )
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups must be at least 0, got {self.num_warmups}.", param="num_warmups")

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith(CHAT_PATH)


class ServeBenchmark:
    """A server, and a workload for it, ready to be run at one rate or at several. Use it as an async context manager.

    Args:
        config, dataset, report: as the command line has them.
        find_tokenizer: loads the tokenizer of a name.
        say: where messages go.
    """

    def __init__(
        self,
        config: ServeConfig,
        dataset: DatasetConfig,
        report: ReportConfig,
        find_tokenizer: FindTokenizer,
        say: Callable[[str], object] = print,
    ) -> None:
        self._config, self._dataset, self._report = config, dataset, report
        self._find_tokenizer = find_tokenizer
        self._say = say
        self._client = HTTPClient(config.base_url, config.headers, verify=config.verify)
        self._endpoint: Endpoint | None = None
        self._requests: list[BenchRequest] = []
        self._model = self._tokenizer_name = ""

    async def __aenter__(self) -> ServeBenchmark:
        """Find the model and its tokenizer, make the workload, and wait for the server.

        Raises:
            JaxserveError: there is no server, no model, no tokenizer of the name given, or no workload.
        """
        config = self._config
        await self._wait_ready()
        if config.model is None:
            name, root = await first_model(self._client)
            self._model, asked = root, config.served_model_name or name
            self._say(f"Model {name!r}, the first that {config.base_url} names.")
        else:
            self._model, asked = config.model, config.served_model_name or config.model
        tokenizer = self._load_tokenizer()
        self._requests = make_requests(self._dataset, tokenizer, chat=config.chat)
        ignore_eos = self._dataset.name == "random" if config.ignore_eos is None else config.ignore_eos
        self._endpoint = Endpoint(
            self._client, config.endpoint, config.chat, asked, config.extra_body, ignore_eos, config.logprobs,
            config.request_id_prefix, tokenizer,
        )  # fmt: skip
        await self._warm_up(self._endpoint)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()

    async def run(self, traffic: Traffic) -> dict[str, Any]:
        """Send the workload once; the results, with vLLM's keys.

        Raises:
            JaxserveError: not one request succeeded.
        """
        endpoint = self._endpoint
        assert endpoint is not None, "use it as a context manager"
        # Nothing is collected meanwhile: it would stop every stream for as long.
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            async with self._profile():
                with _bar(len(self._requests), self._config.progress) as bar:
                    results, seconds = await send_all(
                        endpoint.send, self._requests, traffic, self._dataset.seed, bar.update
                    )
        finally:
            gc.enable()
            gc.unfreeze()
        summary = summarise(results, seconds, self._report)
        print_table(summary, self._report, self._say)
        self._tell_errors([result.error for result in results if not result.success], len(results))
        return self._head(traffic) | summary

    # --- before the run -------------------------------------------------------------------------------------

    async def _wait_ready(self) -> None:
        end = time.monotonic() + self._config.ready_seconds
        while True:
            try:
                response = await self._client.request("GET", "/v1/models")
                if response.status < 500:
                    return
                reason = f"HTTP {response.status}"
            except ServerUnreachableError as error:
                reason = str(error)
            if time.monotonic() >= end:
                raise ServerUnreachableError(
                    f"{reason} Start a server with 'jaxserve serve', or name one with --base-url."
                )
            await asyncio.sleep(READY_POLL_SECONDS)

    def _load_tokenizer(self) -> Tokenizer | None:
        config = self._config
        self._tokenizer_name = config.tokenizer or self._model
        if config.skip_tokenizer:
            self._tokenizer_name = ""
            return None
        try:
            return self._find_tokenizer(self._tokenizer_name)
        except JaxserveError as error:
            if config.tokenizer is not None:
                raise
            reason = str(error).splitlines()[0]
            self._say(
                f"Without a tokenizer for {self._tokenizer_name!r} ({reason}) random prompts are made of words, about "
                "a token each, and the server counts them. --tokenizer names one for exact lengths."
            )
            self._tokenizer_name = ""
            return None

    async def _warm_up(self, endpoint: Endpoint) -> None:
        count = self._config.num_warmups
        if not count:
            return
        self._say(f"Warming up with {count} requests.")
        warmups = [self._requests[index % len(self._requests)] for index in range(count)]
        results = await asyncio.gather(
            *(endpoint.send(request, f"warmup-{index}") for index, request in enumerate(warmups))
        )
        self._tell_errors([result.error for result in results if not result.success], count)

    # --- around the run -------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _profile(self):
        if not self._config.profile:
            yield
            return
        await self._post("/start_profile")
        try:
            yield
        finally:
            await self._post("/stop_profile")

    async def _post(self, path: str) -> None:
        response = await self._client.request("POST", path)
        if response.status != 200:
            raise JaxserveError(
                f"{path} answered with HTTP {response.status}: {response.body.decode(errors='replace')[:300]}"
            )

    def _tell_errors(self, errors: Sequence[str], count: int) -> None:
        """Say what went wrong, most frequent first.

        Raises:
            JaxserveError: everything did.
        """
        kinds = sorted({error: errors.count(error) for error in errors}.items(), key=lambda item: -item[1])
        for error, number in kinds[:5]:
            self._say(f"{number} failed: {error}")
        if len(errors) == count:
            raise JaxserveError(f"None of {count} requests succeeded. The first error: {errors[0]}")

    def _head(self, traffic: Traffic) -> dict[str, Any]:
        config = self._config
        head: dict[str, Any] = {
            "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": config.backend,
            "backend": config.backend,
            "label": config.label,
            "model_id": self._model,
            "tokenizer_id": self._tokenizer_name or None,
            "num_prompts": len(self._requests),
            **config.metadata,
            "request_rate": "inf" if isinf(traffic.request_rate) else traffic.request_rate,
            "burstiness": traffic.burstiness,
            "max_concurrency": traffic.max_concurrency,
        }
        if traffic.ramp_up is not None:
            head |= {
                "ramp_up_strategy": traffic.ramp_up,
                "ramp_up_start_rps": traffic.ramp_up_start_rps,
                "ramp_up_end_rps": traffic.ramp_up_end_rps,
            }
        return head


def _bar(total: int, show: bool) -> tqdm[Any]:
    return tqdm(total=total, disable=not (show and sys.stderr.isatty()), unit="req")


def result_path(result: Mapping[str, Any], folder: str | None, name: str | None) -> Path:
    """Where a result is kept: as vLLM names it, unless ``name`` is given. The folder is made.

    Args:
        result: from ``ServeBenchmark.run``.
        folder: None is the current one.
        name: of the file.
    """
    if name is None:
        label = result["label"] or result["backend"]
        limit = result["max_concurrency"]
        concurrency = "" if limit is None else f"-concurrency{limit}"
        model = os.path.basename(str(result["model_id"]).rstrip("/"))
        name = f"{label}-{result['request_rate']}qps{concurrency}-{model}-{result['date']}.json"
    path = Path(folder or ".") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def save_result(
    result: Mapping[str, Any], path: Path, *, detailed: bool = False, append: bool = False
) -> None:
    """Write a result as one line of JSON.

    Args:
        result, path: what and where.
        detailed: keep the fields with an entry a request.
        append: add it to what the file holds.
    """
    kept = result if detailed else {name: value for name, value in result.items() if name not in DETAILS}
    with path.open("a" if append else "w", encoding="utf-8") as file:
        file.write(json.dumps(kept) + "\n")

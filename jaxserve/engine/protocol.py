"""EngineClient: the engine as the server sees it; AsyncEngine implements it, tests use a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from jaxserve.metrics.engine_metrics import EngineMetrics
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import EngineInfo
from jaxserve.tokenizer.interface import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""


class RequestStream(Protocol):
    """The outputs of one admitted request. Leaving it early (``aclose``) aborts the request."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def aclose(self) -> None: ...


class EngineClient(Protocol):
    """What the server needs of an engine."""

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved while starting."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None with ``skip_tokenizer_init``."""
        ...

    @property
    def model_type(self) -> str | None:
        """The model's family as ``config.json`` names it, such as ``qwen3``."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end a sequence."""
        ...

    @property
    def max_logprobs(self) -> int:
        """The most log probabilities a request may ask for; -1 is the whole vocabulary."""
        ...

    @property
    def errored(self) -> BaseException | None:
        """Why the engine core died; None while it lives."""
        ...

    def default_sampling_params(self) -> dict[str, Any]:
        """SamplingParams fields from ``generation_config.json`` and ``override_generation_config``."""
        ...

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> RequestStream:
        """Validate, tokenize and admit a request.

        Raises:
            InvalidRequestError: the request's own mistake, before anything was admitted.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine core died.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early: their streams end with ``finish_reason`` abort. Unknown or finished ids are ignored."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        ...

    async def start_profile(self) -> None:
        """Begin a profile of the engine core.

        Raises:
            InvalidRequestError: profiling is off, or a profile runs already.
        """
        ...

    async def stop_profile(self) -> None:
        """End the profile and write it.

        Raises:
            InvalidRequestError: no profile runs.
        """
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize for /tokenize, without admitting anything."""
        ...

    def attach_metrics(self, metrics: EngineMetrics) -> None:
        """Feed ``metrics`` from now on. The server owns the registry and its labels (the served model's name)."""
        ...

    def shutdown(self) -> None:
        """End the engine core and everything it started; callable twice, and after the core died."""
        ...

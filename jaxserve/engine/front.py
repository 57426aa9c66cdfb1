"""Front: the host-side half of an engine that LLM and AsyncEngine share: files, tokenizer, processors, defaults."""

from __future__ import annotations

import importlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jaxserve.config import EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.engine.grammars import grammar_compiler
from jaxserve.engine.input_processor import InputProcessor, ProcessedRequest
from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError
from jaxserve.step import EngineInfo
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.tokenizer.interface import Tokenizer
from jaxserve.tokenizer.load import load_tokenizer, resolve_eos_token_ids
from jaxserve.weights.resolve import ModelFiles, resolve_model

logger = logging.getLogger(__name__)

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Keys of generation_config.json that are sampling parameters of the same name."""


@dataclass(frozen=True)
class Front:
    """What is known of a model without its weights."""

    files: ModelFiles
    tokenizer: Tokenizer | None
    eos_token_ids: list[int]
    default_sampling_params: dict[str, Any]

    @classmethod
    def load(cls, config: ModelConfig) -> Front:
        """Find the model, load its tokenizer and sampling defaults.

        Raises:
            JaxserveError: saying what is missing or broken.
        """
        files = resolve_model(config.model, config.revision, weights=config.load_format != "dummy")
        hf_config = {**files.config, **config.hf_overrides}
        tokenizer = None
        if not config.skip_tokenizer_init:
            try:
                if config.tokenizer is not None:
                    tokenizer = load_tokenizer(config.tokenizer)
                else:
                    tokenizer = load_tokenizer(files.path, files.format)
            except JaxserveError:
                _check_architecture(hf_config)
                raise
        eos_token_ids = resolve_eos_token_ids(tokenizer, hf_config, files.generation_config)
        generation_config = read_generation_config(config.generation_config, files.generation_config)
        return cls(files, tokenizer, eos_token_ids, sampling_defaults(config, generation_config))

    def input_processor(
        self, config: EngineConfig, info: EngineInfo, grammars: GrammarCompiler | None = None
    ) -> InputProcessor:
        """For a ready engine; ``grammars`` of a core in the same process are shared."""
        if grammars is None:
            grammars = grammar_compiler(lambda: (self.tokenizer, self.eos_token_ids), lambda: info.vocab_size)
        return InputProcessor(
            self.tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_logprobs=config.model_config.max_logprobs,
            eos_token_ids=self.eos_token_ids,
            seed=config.model_config.seed,
            default_sampling_params=self.default_sampling_params,
            grammars=grammars,
        )


def _check_architecture(hf_config: dict[str, Any]) -> None:
    """A model that cannot be served anyway is the greater problem than its tokenizer.

    Raises:
        UnsupportedModelError: naming the architecture.
    """
    # Through importlib, and only when starting has failed already: it imports JAX.
    registry: Any = importlib.import_module("jaxserve.models.registry")
    registry.find_family(hf_config)


def read_generation_config(source: str, of_model: dict[str, Any]) -> dict[str, Any]:
    """The generation config that ``generation_config`` names: the model's, none, or a folder's.

    Raises:
        ConfigError: the folder has no readable generation_config.json.
    """
    if source == "auto":
        return of_model
    if source in ("jaxserve", "vllm"):
        return {}
    path = Path(source).expanduser() / "generation_config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"generation_config {source!r} is neither 'auto' nor 'jaxserve' nor a folder with a readable "
            f"generation_config.json: {error}",
            param="generation_config",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object.", param="generation_config")
    return cast("dict[str, Any]", content)


def sampling_defaults(config: ModelConfig, generation_config: dict[str, Any]) -> dict[str, Any]:
    """SamplingParams fields that requests leave open: the model's, then the server's."""
    merged = {**generation_config, **config.override_generation_config}
    if merged.get("do_sample") is False and "temperature" not in config.override_generation_config:
        merged["temperature"] = (
            None  # transformers ignores the temperature then; so do the request's defaults
        )
    defaults = {name: merged[name] for name in DEFAULTS if merged.get(name) is not None}
    if merged.get("max_new_tokens") is not None:
        defaults["max_tokens"] = merged["max_new_tokens"]
    return defaults


def check_fits(request: ProcessedRequest, info: EngineInfo) -> None:
    """Refuse a prompt that the engine could never compute, before it is sent to the core.

    Raises:
        InvalidRequestError: it is longer than a step (without chunked prefill) or than the whole cache.
    """
    num_tokens = len(request.prompt_token_ids)
    if num_tokens > info.max_prompt_tokens:
        raise InvalidRequestError(
            f"The prompt has {num_tokens} tokens; this engine's KV cache and token budget allow "
            f"{info.max_prompt_tokens}. Please reduce the length of the input prompt.",
            param="prompt",
            code="context_length_exceeded",
        )


def check_priority(priority: int, config: SchedulerConfig) -> None:
    """Refuse a priority that would be ignored.

    Raises:
        InvalidRequestError: the scheduler is first come, first served.
    """
    if priority and config.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority is {priority}, but this engine serves first come, first served. Start it with "
            "--scheduling-policy priority.",
            param="priority",
        )


def read_chat_template(value: str | None) -> str | None:
    """The text of a chat template that is given as a file or as the text itself.

    Raises:
        ConfigError: it is neither.
    """
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template {value!r} is neither a readable file nor a Jinja template: {error}",
            param="chat_template",
        ) from None

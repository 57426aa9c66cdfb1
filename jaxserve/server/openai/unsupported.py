"""Fields that clients of OpenAI and vLLM know but that are not offered: refused by name if they ask for more
than nothing.

To offer one, remove its line here and declare the field on the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

AsksNothing = Callable[[Any, dict[str, Any]], bool]
"""Whether a value, in its body, asks for nothing: then the field may stay."""


def _nothing(*values: Any) -> AsksNothing:
    """None, or one of ``values`` with the same type (True is not 1)."""
    neutral = (None, *values)
    return lambda value, _body: any(value == known and type(value) is type(known) for known in neutral)


def _same_as_n(value: Any, body: dict[str, Any]) -> bool:
    return value is None or (value == (body.get("n") or 1) and not isinstance(value, bool))


UNSUPPORTED: dict[str, AsksNothing] = {
    # OpenAI
    "audio": _nothing(),
    "best_of": _same_as_n,
    "function_call": _nothing("none"),
    "functions": _nothing(),
    "modalities": _nothing(["text"]),
    "prediction": _nothing(),
    "reasoning_effort": _nothing(),
    "suffix": _nothing(""),
    "tool_choice": _nothing("none"),
    "tools": _nothing(),
    "verbosity": _nothing(),
    "web_search_options": _nothing(),
    # vLLM
    "ec_transfer_params": _nothing(),
    "guided_choice": _nothing(),
    "guided_decoding_backend": _nothing(),
    "guided_grammar": _nothing(),
    "guided_json": _nothing(),
    "guided_regex": _nothing(),
    "guided_whitespace_pattern": _nothing(),
    "kv_transfer_params": _nothing(),
    "logprob_token_ids": _nothing(),
    "media_io_kwargs": _nothing(),
    "mm_processor_kwargs": _nothing(),
    "prompt_embeds": _nothing(),
    "return_weight_versions": _nothing(False),
    "stream_interval": _nothing(1),
    "thinking_token_budget": _nothing(),
    "vllm_xargs": _nothing(),
    "watermarking": _nothing(),
}

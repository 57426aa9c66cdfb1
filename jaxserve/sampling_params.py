"""SamplingParams: how a request's tokens are chosen and when it ends, validated once, where the user can see it.

Meanings, defaults and limits are vLLM's. A parameter is honoured or refused by name.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.reasoning_params import ReasoningParams
from jaxserve.structured_outputs_params import StructuredOutputsParams

MAX_N = 16384
MAX_LOGIT_BIAS = 1024
"""Entries of ``logit_bias`` a request may carry: the width of the device's bias table."""
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
MAX_BEAMS = 512
MAX_PATTERN = 1024
"""Tokens of a pattern, and repetitions, that ``repetition_detection`` may look for."""
TRUNCATION_SIDES = ("left", "right")
LARGEST = sys.float_info.max
MAX_STRING_LENGTH = 1024
"""Characters of a stop string or bad word."""
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""
MIN_TEMPERATURE = 1e-2
"""Smaller positive temperatures are raised to this: below it float32 logits overflow."""


class RepetitionDetection(msgspec.Struct, frozen=True):
    """End an output that repeats itself: its last tokens are one pattern, over and over.

    Args:
        max_pattern_size: tokens of the longest pattern looked for (1 to 1024).
        min_pattern_size: tokens of the shortest one.
        min_count: how often the pattern must stand at the end of the output, 2 to 1024.

    Raises:
        InvalidRequestError: out of range.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        name = "repetition_detection"
        _check_int(f"{name}.max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN, param=name)
        _check_int(f"{name}.min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size, param=name)
        _check_int(f"{name}.min_count", self.min_count, 2, MAX_PATTERN, param=name)

    def found_in(self, token_ids: list[int], num_output_tokens: int) -> bool:
        """Whether the last ``num_output_tokens`` of ``token_ids`` end in such a repetition."""
        last = token_ids[-1]
        largest = min(self.max_pattern_size, num_output_tokens // self.min_count)
        for size in range(self.min_pattern_size, largest + 1):
            if token_ids[-1 - size] != last:
                continue
            tail = token_ids[-size * self.min_count :]
            if tail[size:] == tail[:-size]:
                return True
        return False


class RequestOutputKind(enum.IntEnum):
    """What each streamed output of a request carries."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=False):
    """How to sample one request.

    Args:
        n: completions of the prompt (1 to 16384).
        presence_penalty: added once for every token that the output holds, in [-2, 2].
        frequency_penalty: added per occurrence in the output, in [-2, 2].
        repetition_penalty: divides (or multiplies) logits of tokens in prompt or output, > 0.
        temperature: in [0, 2]; 0 is greedy.
        top_p: in (0, 1].
        top_k: -1 or 0 is off.
        min_p: in [0, 1], relative to the most likely token.
        seed: a 64-bit integer; the same seed gives the same text whatever else runs. -1 means none.
        stop: strings that end the output.
        stop_token_ids: token ids that end the output.
        ignore_eos: go on after the end-of-sequence token.
        max_tokens: output tokens at most; None is up to the context length.
        min_tokens: no end-of-sequence or stop token before this many output tokens.
        logprobs: log probabilities of this many most likely tokens per output token; -1 is the whole vocabulary.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: token id to a bias in [-100, 100] (clamped), 1024 entries at most.
        allowed_token_ids: only these may be sampled.
        bad_words: strings that the output may not contain.
        structured_outputs: the form that the output must have; it wins over bad_words, min_tokens and ignore_eos.
        include_stop_str_in_output: keep the stop string in the text.
        detokenize: turn tokens into text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between special tokens in the text.
        shown_special_tokens: ids of special tokens that stay in the text even with ``skip_special_tokens``: those that
            a parser of tool calls or reasoning needs to see.
        reasoning: where reasoning begins and ends; set by servers, with a budget or beside ``structured_outputs``.
        truncate_prompt_tokens: keep only this many prompt tokens, the last ones; -1 is the context length.
        truncation_side: which end of the prompt truncation cuts off, ``left`` (default) or ``right``.
        repetition_detection: ends an output that repeats itself (``finish_reason`` repetition).
        output_kind: what each streamed output carries.
        extra_args: reserved for processors registered by the user; refused unless one takes them.

    Raises:
        InvalidRequestError: with the parameter's name.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    shown_special_tokens: list[int] | None = None
    reasoning: ReasoningParams | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    repetition_detection: RepetitionDetection | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, exclude_low=True)
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, exclude_low=True)
        _check_int("top_k", self.top_k, -1, None)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
            self.seed = None if self.seed == -1 else self.seed
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens",
                     "spaces_between_special_tokens"):  # fmt: skip
            _check_bool(name, getattr(self, name))
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, -1, None)
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError(
                    "truncate_prompt_tokens is 0; use -1 (the context length) or 1 and more.",
                    param="truncate_prompt_tokens",
                )
        if self.truncation_side is not None and self.truncation_side not in TRUNCATION_SIDES:
            raise InvalidRequestError(
                f"truncation_side must be 'left' or 'right', got {self.truncation_side!r}.",
                param="truncation_side",
            )
        if self.repetition_detection is not None and not isinstance(
            cast(Any, self.repetition_detection), RepetitionDetection
        ):
            raise InvalidRequestError(
                "repetition_detection must be a RepetitionDetection.", param="repetition_detection"
            )
        if not isinstance(cast(Any, self.structured_outputs), (StructuredOutputsParams, type(None))):
            raise InvalidRequestError(
                f"structured_outputs must be StructuredOutputsParams, got {type(self.structured_outputs).__name__}.",
                param="structured_outputs",
            )
        self._check_stops()
        self._check_token_sets()
        self._normalise_temperature()

    def _check_stops(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(_check_strings("stop", self.stop, MAX_STOP_STRINGS)) or None
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True.", param="stop")
        self.stop_token_ids = list(dict.fromkeys(_check_ids("stop_token_ids", self.stop_token_ids))) or None
        shown = list(dict.fromkeys(_check_ids("shown_special_tokens", self.shown_special_tokens)))
        self.shown_special_tokens = shown or None
        self.bad_words = list(_check_strings("bad_words", self.bad_words, MAX_BAD_WORDS)) or None

    def _check_token_sets(self) -> None:
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list(
                dict.fromkeys(_check_ids("allowed_token_ids", self.allowed_token_ids))
            )
            if not self.allowed_token_ids:
                raise InvalidRequestError("allowed_token_ids is empty: nothing could be sampled.",
                                          param="allowed_token_ids")  # fmt: skip
        if not self.logit_bias:
            self.logit_bias = None
            return
        if not isinstance(cast(Any, self.logit_bias), dict):
            raise InvalidRequestError("logit_bias must map token ids to numbers.", param="logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are supported.",
                param="logit_bias",
            )
        _check_ids("logit_bias", list(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            _check_float(f"logit_bias[{token_id}]", bias, -math.inf, math.inf, param="logit_bias")
        self.logit_bias = {int(k): min(100.0, max(-100.0, float(v))) for k, v in self.logit_bias.items()}

    def _normalise_temperature(self) -> None:
        if self.temperature < GREEDY_TEMPERATURE:
            if self.n > 1:
                raise InvalidRequestError(
                    f"n is {self.n}, but with temperature 0 all completions would be the same; use n=1.",
                    param="n",
                )
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        if self.top_k == -1:
            self.top_k = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def needs_penalties(self) -> bool:
        """Whether the request's own history changes its logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with ``changes``, validated anew."""
        return msgspec.structs.replace(self, **changes)


def _check_int(name: str, value: object, low: int, high: int | None, *, param: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}.", param=param or name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidRequestError(f"{name} must be {bound}, got {value}.", param=param or name)


def _check_float(
    name: str, value: object, low: float, high: float, *, exclude_low: bool = False, param: str | None = None
) -> None:
    # Integers may be larger than any float: isfinite would overflow.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST <= value <= LARGEST:
        raise InvalidRequestError(
            f"{name} must be a finite number, got {str(value)[:40]}.", param=param or name
        )
    if value < low or value > high or (exclude_low and value == low):
        bound = f"{'(' if exclude_low else '['}{low}, {high}]"
        raise InvalidRequestError(f"{name} must be in {bound}, got {value}.", param=param or name)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {value!r}.", param=name)


def _check_strings(name: str, values: object, limit: int) -> Sequence[str]:
    if values is None:
        return []
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise InvalidRequestError(f"{name} must be a list of strings.", param=name)
    if len(values) > limit:
        raise InvalidRequestError(
            f"{name} has {len(values)} entries; at most {limit} are allowed.", param=name
        )
    if any(not v for v in values):
        raise InvalidRequestError(f"{name} holds an empty string.", param=name)
    longest = max(map(len, values), default=0)
    if longest > MAX_STRING_LENGTH:
        raise InvalidRequestError(
            f"{name} holds a string of {longest} characters; at most {MAX_STRING_LENGTH} are allowed.",
            param=name,
        )
    return values


def _check_ids(name: str, values: object) -> Sequence[int]:
    if values is None:
        return []
    if not isinstance(values, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list of token ids.", param=name)
    for value in values:
        _check_int(name, value, 0, None)
    return values


class BeamSearchParams(msgspec.Struct, kw_only=False):
    """How to search with beams: the ``beam_width`` most likely outputs, as transformers' ``generate`` finds them.

    Args:
        beam_width: beams, and sequences returned (1 to 512).
        max_tokens: output tokens at most.
        ignore_eos: go on after the end-of-sequence token.
        temperature: 0 or 1; scores are the model's own log probabilities, others are refused.
        length_penalty: a sequence's score is its log probability over its length to this power.
        include_stop_str_in_output: keep the end-of-sequence token in the text.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidRequestError: with the parameter's name.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("beam_width", self.beam_width, 1, MAX_BEAMS)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_float("length_penalty", self.length_penalty, -100.0, 100.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _check_bool(name, getattr(self, name))
        if isinstance(cast(Any, self.temperature), bool) or self.temperature not in (0, 1):
            raise InvalidRequestError(
                f"temperature is {self.temperature}; beam search goes by the model's own probabilities: leave it out.",
                param="temperature",
            )

    @property
    def n(self) -> int:
        """Choices of the answer."""
        return self.beam_width

"""InputProcessor: a user's prompt and parameters become requests that the engine core can take unseen.

All that can be wrong with a request is found here, before anything is admitted.
"""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from jaxserve.engine.protocol import Prompt
from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import EngineCoreRequest
from jaxserve.structured_output.compiler import GrammarCompiler
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer
from jaxserve.tokenizer.interface import Tokenizer

T = TypeVar("T")

LONG_TEXT = 8192
"""Characters from which a text is tokenized in a thread: a few milliseconds' work."""
MAX_BAD_WORD_FORMS = 128
"""Tokenized forms of ``bad_words`` a request may carry: the width of the device's table."""
MAX_CACHE_SALT = 128
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_INT64 = 1 << 64
_SHRINK = 4
"""Characters that a normalizer may make one of, at most."""


@dataclass(slots=True)
class ProcessedRequest:
    """A validated, tokenized request: what the output processor keeps, and what the core gets.

    ``core_requests`` holds one request for each of the ``n`` completions; completion i of n > 1 is
    ``"{i}_{request_id}"``, and a single one has the request's own id.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    core_requests: list[EngineCoreRequest]
    arrival_time: float


class InputProcessor:
    """Validates and tokenizes. Give it requests in order of arrival, from one thread.

    Args:
        tokenizer: None serves token ids only.
        max_model_len: longest prompt plus output, in tokens.
        vocab_size: rows of the model's embedding; larger ids are refused.
        max_logprobs: the most ``logprobs`` a request may ask for; -1 allows the whole vocabulary.
        eos_token_ids: ids that end a sequence.
        seed: of the generator from which requests without a seed draw theirs.
        default_sampling_params: fields of SamplingParams where a request brings none at all.
        grammars: where structured_outputs are tried out; None refuses them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        max_model_len: int,
        vocab_size: int,
        max_logprobs: int = 20,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        default_sampling_params: Mapping[str, Any] | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        self.eos_token_ids = list(eos_token_ids)
        self.default_sampling_params = dict(default_sampling_params or {})
        self._seeds = np.random.default_rng(seed % _INT64)
        self._grammars = grammars
        self._executor: ThreadPoolExecutor | None = None

    # --- a request -----------------------------------------------------------------------------------------

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        arrival_time: float | None = None,
    ) -> ProcessedRequest:
        """Validate and tokenize in the calling thread.

        Args:
            request_id: unique among the requests that run.
            prompt: text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            sampling_params: None takes the defaults; copied, so later changes have no effect.
            priority: lower runs first.
            cache_salt: separates this request's prefix cache entries from those of other salts.
            add_special_tokens: let the tokenizer add what it adds (such as the begin-of-sequence token) to
                text.
            arrival_time: ``time.monotonic()``; None is now.

        Raises:
            InvalidRequestError: the request's own mistake, with the parameter's name.
        """
        draft = self._begin(request_id, prompt, sampling_params, priority, cache_salt, arrival_time)
        if draft.token_ids is None and draft.text is not None:
            draft.token_ids = self.encode(
                self._fitting(draft.text, draft.params), add_special_tokens=add_special_tokens
            )
        if (outputs := draft.params.structured_outputs) is not None:
            self._need_grammars().check(outputs)
        return self._finish(draft)

    async def process_async(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        arrival_time: float | None = None,
    ) -> ProcessedRequest:
        """``process``, but a long text is tokenized in a thread so that the event loop goes on."""
        draft = self._begin(request_id, prompt, sampling_params, priority, cache_salt, arrival_time)
        if draft.token_ids is None and draft.text is not None:
            text = self._fitting(draft.text, draft.params)
            draft.token_ids = await self.encode_async(text, add_special_tokens=add_special_tokens)
        if (outputs := draft.params.structured_outputs) is not None:
            await self._need_grammars().check_async(outputs)
        return self._finish(draft)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize ``text``.

        Raises:
            InvalidRequestError: there is no tokenizer, or the text is not valid Unicode.
        """
        return self._need_tokenizer("prompt").encode(text, add_special_tokens=add_special_tokens)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """``encode``, in a thread where the text is long."""
        return await self.run(len(text), lambda: self.encode(text, add_special_tokens=add_special_tokens))

    async def run(self, num_characters: int, work: Callable[[], T]) -> T:
        """Run ``work`` on a text of that length: in a thread if it is long, here if not."""
        if num_characters < LONG_TEXT:
            return work()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """End the threads; those at work finish first."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None
        if self._grammars is not None:
            self._grammars.close()

    # --- its parts -----------------------------------------------------------------------------------------

    def _begin(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        priority: int,
        cache_salt: str | None,
        arrival_time: float | None,
    ) -> _Draft:
        """All that needs no tokens, the seed among it: it is drawn in order of arrival."""
        if not isinstance(cast(Any, request_id), str) or not request_id:
            raise InvalidRequestError(
                f"request_id must be a non-empty string, got {request_id!r}.", param="request_id"
            )
        params = self._check_params(sampling_params)
        text, token_ids, salt_in_prompt = self._read_prompt(prompt)
        seed = params.seed if params.seed is not None else int(self._seeds.integers(0, 2**63 - 1))
        return _Draft(
            request_id=request_id,
            text=text,
            token_ids=token_ids,
            params=params,
            bad_words=self._tokenize_bad_words(params),
            seed=seed,
            priority=_check_priority(priority),
            cache_salt=_check_cache_salt(cache_salt if cache_salt is not None else salt_in_prompt),
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
        )

    def _finish(self, draft: _Draft) -> ProcessedRequest:
        params = draft.params
        token_ids = self._check_length(self._truncate(draft.token_ids, params), params)
        room = self.max_model_len - len(token_ids)
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but the prompt leaves room for {room} tokens.",
                param="min_tokens",
            )
        self._check_contradictions(params, draft.bad_words)
        return ProcessedRequest(
            request_id=draft.request_id,
            prompt=draft.text,
            prompt_token_ids=token_ids,
            sampling_params=params,
            core_requests=list(self._core_requests(draft, token_ids)),
            arrival_time=draft.arrival_time,
        )

    def _core_requests(self, draft: _Draft, token_ids: list[int]) -> Iterable[EngineCoreRequest]:
        params = draft.params
        first = params if params.n == 1 else params.clone(n=1)
        # The prompt is the same for all completions: its log probabilities are computed once.
        others = first if first.prompt_logprobs is None else first.clone(prompt_logprobs=None)
        for index in range(params.n):
            yield EngineCoreRequest(
                request_id=draft.request_id if params.n == 1 else f"{index}_{draft.request_id}",
                prompt_token_ids=token_ids,
                sampling_params=first if index == 0 else others,
                arrival_time=draft.arrival_time,
                seed=_to_int64(draft.seed + index),
                eos_token_ids=self.eos_token_ids,
                bad_words_token_ids=draft.bad_words,
                priority=draft.priority,
                cache_salt=draft.cache_salt,
            )

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise UnsupportedError(
                f"{param} needs a tokenizer, but this engine was started without one (skip_tokenizer_init): "
                "send token ids.",
                param=param,
            )
        return self.tokenizer

    def _need_grammars(self) -> GrammarCompiler:
        if self._grammars is None:
            raise UnsupportedError(
                "structured_outputs is not supported by this engine.", param="structured_outputs"
            )
        return self._grammars

    # --- sampling parameters -------------------------------------------------------------------------------

    def _check_params(self, params: SamplingParams | None) -> SamplingParams:
        """A validated copy of the parameters."""
        if params is None:
            params = SamplingParams(**self.default_sampling_params)
        elif isinstance(cast(Any, params), SamplingParams):
            params = params.clone()
        else:
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}.",
                param="sampling_params",
            )
        self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids)
        self._check_vocabulary("logit_bias", params.logit_bias)
        if params.max_tokens is not None and params.max_tokens > self.max_model_len:
            raise InvalidRequestError(
                f"max_tokens is {params.max_tokens}, but this model's maximum context length is "
                f"{self.max_model_len} tokens.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if self.tokenizer is None:
            if params.stop:
                self._need_tokenizer("stop")
            params.detokenize = False
        return params

    def _check_logprobs(self, name: str, value: int | None) -> None:
        if value is None or self.max_logprobs == -1 or 0 <= value <= self.max_logprobs:
            return
        asked = f"{value} (the whole vocabulary)" if value == -1 else str(value)
        raise InvalidRequestError(
            f"{name} is {asked}, but at most {self.max_logprobs} are served here (--max-logprobs).",
            param=name,
        )

    def _check_vocabulary(self, name: str, token_ids: Iterable[int] | None) -> None:
        for token_id in token_ids or ():
            if token_id >= self.vocab_size:
                raise _out_of_vocabulary(name, token_id, self.vocab_size)

    def _tokenize_bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it stands at the start of a text and after a space."""
        if not params.bad_words:
            return []
        tokenizer = self._need_tokenizer("bad_words")
        forms: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            bare = word.lstrip(" ")
            for text in (bare, " " + bare) if bare else (word,):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if not ids:
                    raise InvalidRequestError(f"bad_words: {word!r} has no tokens.", param="bad_words")
                forms[tuple(ids)] = None
        if len(forms) > MAX_BAD_WORD_FORMS:
            raise InvalidRequestError(
                f"bad_words has {len(forms)} tokenized forms (each word with and without a leading space); "
                f"at most {MAX_BAD_WORD_FORMS} are supported.",
                param="bad_words",
            )
        for form in forms:
            self._check_vocabulary("bad_words", form)
        return [list(form) for form in forms]

    def _check_contradictions(self, params: SamplingParams, bad_words: list[list[int]]) -> None:
        """Refuse restrictions that leave nothing to sample."""
        if params.allowed_token_ids is None:
            return
        allowed = set(params.allowed_token_ids)
        if allowed <= {form[0] for form in bad_words if len(form) == 1}:
            raise InvalidRequestError(
                "bad_words forbids every one of the allowed_token_ids: nothing could be sampled.",
                param="bad_words",
            )
        stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)}
        if params.min_tokens and allowed <= stops:
            raise InvalidRequestError(
                "min_tokens forbids every one of the allowed_token_ids (they all end the request): nothing could be "
                "sampled.",
                param="min_tokens",
            )

    # --- the prompt ----------------------------------------------------------------------------------------

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
        """Text, token ids (None: the text is to be tokenized) and cache salt of a prompt."""
        prompt = cast(Any, prompt)
        if isinstance(prompt, str):
            return prompt, None, None
        if not isinstance(prompt, Mapping):
            return None, self._check_token_ids(prompt), None
        unknown = set(prompt) - _PROMPT_KEYS
        if unknown:
            raise UnsupportedError(
                f"prompt holds {', '.join(sorted(map(repr, unknown)))}; only 'prompt', 'prompt_token_ids' "
                "and 'cache_salt' are supported.",
                param="prompt",
            )
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"prompt must be a string, got {type(text).__name__}.", param="prompt")
        if prompt.get("prompt_token_ids") is not None:
            return text, self._check_token_ids(prompt["prompt_token_ids"]), prompt.get("cache_salt")
        if text is None:
            raise InvalidRequestError("prompt holds neither 'prompt' nor 'prompt_token_ids'.", param="prompt")
        return text, None, prompt.get("cache_salt")

    def _fitting(self, text: str, params: SamplingParams) -> str:
        """The text to tokenize: a far too long one would take minutes, only to be refused or cut then."""
        tokenizer = self._need_tokenizer("prompt")
        if len(text) <= LONG_TEXT + 16 * self.max_model_len or not isinstance(tokenizer, FastTokenizer):
            return text
        characters = self.max_model_len * tokenizer.max_token_length * _SHRINK
        if len(text) <= characters:
            return text
        if params.truncate_prompt_tokens is not None:
            return text[:characters] if params.truncation_side == "right" else text[-characters:]
        raise InvalidRequestError(
            f"This model's maximum context length is {self.max_model_len} tokens, which hold {characters} "
            f"characters at most. However, your prompt has {len(text)} characters. Please reduce the length "
            "of the input prompt.",
            param="prompt",
            code="context_length_exceeded",
        )

    def _check_token_ids(self, values: Any) -> list[int]:
        if isinstance(values, np.ndarray):
            values = values.tolist()
        if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
            raise InvalidRequestError(
                f"prompt must be a string or a list of token ids, got {type(values).__name__}.",
                param="prompt",
            )
        token_ids = list(cast("Sequence[Any]", values))
        if set(map(type, token_ids)) - {int}:
            token_ids = [_check_token_id(index, value) for index, value in enumerate(token_ids)]
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            bad = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise _out_of_vocabulary("prompt", bad, self.vocab_size)
        return token_ids

    def _truncate(self, token_ids: list[int] | None, params: SamplingParams) -> list[int]:
        token_ids = token_ids or []
        keep = params.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep > self.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {keep}, but this model's maximum context length is "
                f"{self.max_model_len} tokens.",
                param="truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        return token_ids[:keep] if params.truncation_side == "right" else token_ids[-keep:]

    def _check_length(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        if not token_ids:
            raise InvalidRequestError("The prompt is empty: it must hold at least one token.", param="prompt")
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, at least one of them "
                f"for the output. However, your prompt has {len(token_ids)} tokens. Please reduce the length "
                "of the input prompt.",
                param="prompt",
                code="context_length_exceeded",
            )
        # The tokenizer may know ids that the model has no embedding for.
        if max(token_ids) >= self.vocab_size:
            raise _out_of_vocabulary("prompt", max(token_ids), self.vocab_size)
        return token_ids


@dataclass(slots=True)
class _Draft:
    """A request whose text may still have to be tokenized."""

    request_id: str
    text: str | None
    token_ids: list[int] | None
    params: SamplingParams
    bad_words: list[list[int]]
    seed: int
    priority: int
    cache_salt: str | None
    arrival_time: float


def _check_token_id(index: int, value: Any) -> int:
    if not isinstance(value, (bool, float, np.bool_)):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidRequestError(
        f"prompt token ids must be integers, but item {index} is {value!r:.80} ({type(value).__name__}).",
        param="prompt",
    )


def _out_of_vocabulary(name: str, token_id: int, vocab_size: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name}: token id {token_id} is out of vocabulary; ids are in [0, {vocab_size - 1}].", param=name
    )


def _check_priority(priority: Any) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise InvalidRequestError(f"priority must be a 64-bit integer, got {priority!r}.", param="priority")
    return priority


def _check_cache_salt(salt: Any) -> str | None:
    if salt is None or (isinstance(salt, str) and 0 < len(salt) <= MAX_CACHE_SALT):
        return salt
    raise InvalidRequestError(
        f"cache_salt must be a string of 1 to {MAX_CACHE_SALT} characters, got {salt!r:.80}.",
        param="cache_salt",
    )


def _to_int64(value: int) -> int:
    """Wrap around, so that seed + index stays a 64-bit integer."""
    return (value + (1 << 63)) % _INT64 - (1 << 63)

"""Workloads: random prompts, shared prefixes, ShareGPT files and JSONL files, with vLLM's names and lengths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxserve.bench.endpoint import BenchRequest
from jaxserve.errors import ConfigError
from jaxserve.tokenizer.chat_template import render
from jaxserve.tokenizer.interface import Tokenizer

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom")
FROM_FILES = ("sharegpt", "custom")
CANDIDATES = 4096
"""Token ids that are tried for the words of random prompts."""
MIN_WORDS = 64
"""With fewer whole words than this, random prompts are made of any tokens."""
ATTEMPTS = 10
PLAIN_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city name team minute idea body back face others level office door health art war
""".split()  # noqa: SIM905 a list of a hundred strings reads worse
"""Prompts without a tokenizer are made of these: one token each in most vocabularies."""
SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT = 1024
SHAREGPT_MAX_TOTAL = 2048
"""Which conversations count, as vLLM has it."""


@dataclass(frozen=True)
class DatasetConfig:
    """A workload. Lengths are in tokens.

    Args:
        name: one of ``DATASETS``.
        num_prompts: requests.
        path: the file of those that come from one.
        seed: of everything random in it.
        input_len, output_len, range_ratio, prefix_len: random prompts: lengths are drawn from
            ``[len * (1 - range_ratio), len * (1 + range_ratio)]``; all begin with the same ``prefix_len`` tokens.
        shared_prefix_len, shared_suffix_len, num_prefixes, shared_output_len: prefix_repetition.
        sharegpt_output_len: instead of the length of each conversation's answer.
        custom_output_len: of requests whose line does not say ``output_tokens``; -1 asks every line to.
        skip_chat_template: send custom prompts to completions as they are.
        oversample: repeat what a file holds until there are enough.
        shuffle: take what a file holds in random order.
    """

    name: str = "random"
    num_prompts: int = 1000
    path: str | None = None
    seed: int = 0
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    shared_prefix_len: int = 256
    shared_suffix_len: int = 256
    num_prefixes: int = 10
    shared_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    skip_chat_template: bool = False
    oversample: bool = True
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise ConfigError(
                f"dataset_name is {self.name!r}; it must be one of {', '.join(DATASETS)}.",
                param="dataset_name",
            )
        if (self.path is None) == (self.name in FROM_FILES):
            need = "needs" if self.path is None else "takes no"
            raise ConfigError(f"The {self.name} dataset {need} --dataset-path.", param="dataset_path")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(
                f"random_range_ratio must be in [0, 1), got {self.range_ratio}.", param="random_range_ratio"
            )
        for name, low in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 0),
                          ("shared_prefix_len", 0), ("shared_suffix_len", 1), ("num_prefixes", 1),
                          ("shared_output_len", 1)):  # fmt: skip
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}.", param=name)


def make_requests(config: DatasetConfig, tokenizer: Tokenizer | None, *, chat: bool) -> list[BenchRequest]:
    """The workload's requests.

    Args:
        config: what they are like.
        tokenizer: None makes random prompts of words, which are about a token each.
        chat: whether they go to an endpoint that renders the chat template itself.

    Raises:
        ConfigError: a file cannot be read or holds nothing of use; or it takes a tokenizer to count its lengths.
    """
    rng = np.random.default_rng(config.seed)
    make: Callable[[], list[BenchRequest]]
    if config.name == "random":
        return _random(config, PromptMaker(tokenizer, rng), rng)
    if config.name == "prefix_repetition":
        return _prefix_repetition(config, PromptMaker(tokenizer, rng), rng)
    if config.name == "sharegpt":
        make = lambda: _sharegpt(config, tokenizer, rng)  # noqa: E731
    else:
        make = lambda: _custom(config, tokenizer, rng, chat)  # noqa: E731
    found = make()
    if not found:
        raise ConfigError(f"{config.path} holds no request of use.", param="dataset_path")
    if len(found) < config.num_prompts and config.oversample:
        picks = rng.integers(len(found), size=config.num_prompts - len(found))
        found += [found[pick] for pick in picks]
    return found[: config.num_prompts]


class PromptMaker:
    """Makes prompts of a given number of tokens.

    Args:
        tokenizer: counts; without one a word counts as a token.
        rng: what is drawn from.
    """

    def __init__(self, tokenizer: Tokenizer | None, rng: np.random.Generator) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._pool = np.array([] if tokenizer is None else _word_ids(tokenizer, rng))

    def draw(self, length: int) -> list[int]:
        """``length`` random tokens (or words), to be combined and given to ``text``."""
        if self._tokenizer is None:
            return self._rng.integers(len(PLAIN_WORDS), size=length).tolist()
        return self._pool[self._rng.integers(len(self._pool), size=length)].tolist()

    def text(self, ids: list[int]) -> tuple[str, int]:
        """A text of as many tokens, and how many it has: a vocabulary may merge or split a few."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return " ".join(PLAIN_WORDS[index] for index in ids), len(ids)
        length = len(ids)
        text, encoded = "", list[int]()
        for _ in range(ATTEMPTS):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            encoded = tokenizer.encode(text, add_special_tokens=False)
            if len(encoded) == length:
                break
            ids = encoded[:length] if len(encoded) > length else encoded + self.draw(length - len(encoded))
        return text, len(encoded)


def _word_ids(tokenizer: Tokenizer, rng: np.random.Generator) -> list[int]:
    """Token ids that stay themselves when they are decoded and encoded again: whole words with a space before them."""
    candidates = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_token_ids]
    picks = rng.permutation(len(candidates))[:CANDIDATES]
    words: list[int] = []
    for token_id in (candidates[pick] for pick in sorted(picks.tolist())):
        text = tokenizer.decode([token_id])
        word = text[1:]
        is_word = text[:1] == " " and word.isascii() and word.isalpha()
        if is_word and tokenizer.encode(text, add_special_tokens=False) == [token_id]:
            words.append(token_id)
    return words if len(words) >= MIN_WORDS else candidates


def _lengths(mean: int, ratio: float, count: int, rng: np.random.Generator) -> list[int]:
    low, high = max(1, math.floor(mean * (1 - ratio))), max(1, math.ceil(mean * (1 + ratio)))
    return rng.integers(low, high + 1, size=count).tolist()


def _random(config: DatasetConfig, maker: PromptMaker, rng: np.random.Generator) -> list[BenchRequest]:
    inputs = _lengths(config.input_len, config.range_ratio, config.num_prompts, rng)
    outputs = _lengths(config.output_len, config.range_ratio, config.num_prompts, rng)
    prefix = maker.draw(config.prefix_len)
    return [
        BenchRequest(*maker.text(prefix + maker.draw(length)), output)
        for length, output in zip(inputs, outputs)
    ]


def _prefix_repetition(
    config: DatasetConfig, maker: PromptMaker, rng: np.random.Generator
) -> list[BenchRequest]:
    prefixes = [maker.draw(config.shared_prefix_len) for _ in range(config.num_prefixes)]
    requests = [
        BenchRequest(
            *maker.text(prefixes[index % config.num_prefixes] + maker.draw(config.shared_suffix_len)),
            config.shared_output_len,
        )
        for index in range(config.num_prompts)
    ]
    return [requests[index] for index in rng.permutation(len(requests))]


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset_path {path!r} cannot be read: {error}", param="dataset_path") from None


def _shuffled(items: Sequence[Any], config: DatasetConfig, rng: np.random.Generator) -> list[Any]:
    return [items[index] for index in rng.permutation(len(items))] if config.shuffle else list(items)


def _sharegpt(
    config: DatasetConfig, tokenizer: Tokenizer | None, rng: np.random.Generator
) -> list[BenchRequest]:
    if tokenizer is None:
        raise ConfigError("The sharegpt dataset needs a tokenizer to choose conversations by length: --tokenizer.",
                          param="tokenizer")  # fmt: skip
    assert config.path is not None
    try:
        content = json.loads(_read(config.path))
    except ValueError as error:
        raise ConfigError(
            f"dataset_path {config.path!r} is not JSON: {error}", param="dataset_path"
        ) from None
    if not isinstance(content, list):
        raise ConfigError(
            f"dataset_path {config.path!r} must hold a list of conversations.", param="dataset_path"
        )
    found: list[BenchRequest] = []
    for entry in _shuffled(cast("list[Any]", content), config, rng):
        if len(found) == config.num_prompts:
            break
        turns = entry.get("conversations") if isinstance(entry, dict) else None  # pyright: ignore
        if not isinstance(turns, list) or len(turns) < 2:  # pyright: ignore
            continue
        if not all(isinstance(turn, dict) for turn in turns[:2]):  # pyright: ignore
            continue
        prompt, answer = (str(turn.get("value", "")) for turn in turns[:2])  # pyright: ignore
        prompt_len = len(tokenizer.encode(prompt))
        output_len = config.sharegpt_output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        fits = prompt_len <= SHAREGPT_MAX_PROMPT and prompt_len + output_len <= SHAREGPT_MAX_TOTAL
        long_enough = config.sharegpt_output_len or output_len >= SHAREGPT_MIN_TOKENS
        if fits and long_enough and prompt_len >= SHAREGPT_MIN_TOKENS:
            found.append(BenchRequest(prompt, prompt_len, output_len))
    return found


def _custom(
    config: DatasetConfig, tokenizer: Tokenizer | None, rng: np.random.Generator, chat: bool
) -> list[BenchRequest]:
    assert config.path is not None
    lines = [(i, line) for i, line in enumerate(_read(config.path).splitlines(), 1) if line.strip()]
    return [
        _custom_request(config, f"{config.path}, line {number}", line, tokenizer, chat)
        for number, line in _shuffled(lines, config, rng)[: config.num_prompts]
    ]


def _custom_request(
    config: DatasetConfig, place: str, line: str, tokenizer: Tokenizer | None, chat: bool
) -> BenchRequest:
    """A line: ``{"prompt": text, "output_tokens": n}``, or ``messages`` instead of ``prompt`` for chat."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}", param="dataset_path") from None
    messages = entry.get("messages") if isinstance(entry, dict) and chat else None  # pyright: ignore
    prompt = entry.get("prompt", "" if messages else None) if isinstance(entry, dict) else None  # pyright: ignore
    if not isinstance(prompt, str) or not (prompt or messages):
        raise ConfigError(
            f"{place} must be an object with a 'prompt' (for chat, or 'messages').", param="dataset_path"
        )
    output_len: Any = entry.get("output_tokens", config.custom_output_len)
    if not isinstance(output_len, int) or output_len < 1:
        raise ConfigError(f"{place}: output_tokens must be a positive number, got {output_len!r}.",
                          param="custom_output_len")  # fmt: skip
    if not chat and tokenizer is not None and tokenizer.chat_template and not config.skip_chat_template:
        prompt = render(tokenizer, [{"role": "user", "content": prompt}])
    prompt_len = None if tokenizer is None or messages else len(tokenizer.encode(prompt))
    return BenchRequest(prompt, prompt_len, output_len, cast("list[dict[str, Any]] | None", messages))

"""SamplingMetadata: how each row of one step is sampled, as one int32 table that travels in one transfer.

The host keeps a persistent numpy table with one row per request row (``make_table``, filled once by
``write_row``), gathers the step's rows with one ``take``, writes positions, and sends the result; the
device reads its columns (``SamplingMetadata``). Floats travel bit-cast. A new sampling parameter is one
``Column`` and one property of the same name here, and one processor in ``logits_processors.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.sampling_params import SamplingParams

MAX_TOP = 64
"""Rows with a top-k of up to this are sampled from that many largest logits, without a pass of their own."""


class Feature(enum.IntFlag):
    """What a row asks for beyond greedy decoding. The union over a step's rows decides which work is done."""

    NONE = 0
    PENALTY = 1
    MASK = 2
    BIAS = 4
    TOP_K = 8
    """Random, with a top-k in [2, MAX_TOP]."""
    RANDOM = 16
    """Random over the whole vocabulary, without top-k and top-p."""
    TOP_P = 32
    """Random over the whole vocabulary, with top-p."""
    LARGE_TOP_K = 64
    """Random over the whole vocabulary, with a top-k beyond MAX_TOP (and perhaps TOP_P)."""
    LOGPROBS = 128


ALL_FEATURES = Feature(255)


@dataclass(frozen=True)
class Column:
    """One int32 column of the table: float32 and uint32 values are stored by their bits."""

    name: str
    dtype: type[np.generic]
    padding: float
    """Value of padding rows; they are greedy and ask for nothing."""
    value: Callable[[SamplingParams], float] | None = None
    """Reads a request's value; None for columns that the batch builder or ``write_row`` fills."""


COLUMNS: tuple[Column, ...] = (
    Column("row_ids", np.int32, 0),
    Column("positions", np.int32, 0),
    Column("features", np.int32, 0),
    Column("seed_lo", np.uint32, 0),
    Column("seed_hi", np.uint32, 0),
    Column("temperature", np.float32, 0.0, lambda p: 0.0 if _is_greedy(p) else p.temperature),
    Column("top_k", np.int32, 0, lambda p: min(max(p.top_k, 0), 2**31 - 1)),
    Column("top_p", np.float32, 1.0, lambda p: p.top_p),
    Column("min_p", np.float32, 0.0, lambda p: p.min_p),
    Column("presence_penalty", np.float32, 0.0, lambda p: p.presence_penalty),
    Column("frequency_penalty", np.float32, 0.0, lambda p: p.frequency_penalty),
    Column("repetition_penalty", np.float32, 1.0, lambda p: _in_float32(p.repetition_penalty)),
    Column("num_bias", np.int32, 0, lambda p: len(p.logit_bias or ())),
    Column("use_mask", np.int32, 0),
)
NUM_COLUMNS = len(COLUMNS)
COLUMN: dict[str, int] = {column.name: index for index, column in enumerate(COLUMNS)}
"""Column name to its index in the table."""


def _in_float32(value: float) -> float:
    # A positive number must not become 0 or infinite: 0 / 0 and 0 * inf are NaN.
    limits = np.finfo(np.float32)
    return min(max(value, float(limits.tiny)), float(limits.max))


def _is_greedy(params: SamplingParams) -> bool:
    # top_k = 1 leaves one token: the argmax, found without drawing a number.
    return params.greedy or params.top_k == 1


def features_of(params: SamplingParams) -> Feature:
    """What ``params`` ask of the device, the token mask aside (``set_masked``)."""
    features = Feature.NONE
    if params.needs_penalties:
        features |= Feature.PENALTY
    if params.logit_bias:
        features |= Feature.BIAS
    if not _is_greedy(params):
        features |= _random_feature(params)
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    return features


def _random_feature(params: SamplingParams) -> Feature:
    if 0 < params.top_k <= MAX_TOP:
        return Feature.TOP_K
    features = Feature.LARGE_TOP_K if params.top_k > 0 else Feature.NONE
    if params.top_p < 1:
        features |= Feature.TOP_P
    return features or Feature.RANDOM


def make_table(max_num_seqs: int) -> np.ndarray:
    """The persistent host table, int32[max_num_seqs + 1, NUM_COLUMNS]; the last row is the padding row."""
    table = np.zeros((max_num_seqs + 1, NUM_COLUMNS), np.int32)
    for index, column in enumerate(COLUMNS):
        table[:, index] = np.asarray(column.padding, column.dtype).view(np.int32)
    table[:, COLUMN["row_ids"]] = np.arange(max_num_seqs + 1)
    return table


def write_row(table: np.ndarray, row: int, params: SamplingParams, seed: int) -> None:
    """Describe the request that enters persistent row ``row``; its token mask starts unused.

    Args:
        table: from ``make_table``.
        row: in [0, max_num_seqs).
        params: validated parameters.
        seed: any integer; its low 64 bits are the request's random key.
    """
    if not 0 <= row < len(table) - 1:
        raise ValueError(f"row must be in [0, {len(table) - 1}), got {row}.")
    for index, column in enumerate(COLUMNS):
        if column.value is not None:
            table[row, index] = np.asarray(column.value(params), column.dtype).view(np.int32)
    table[row, COLUMN["features"]] = int(features_of(params))
    table[row, COLUMN["use_mask"]] = 0
    words = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32).view(np.int32)
    table[row, COLUMN["seed_lo"]], table[row, COLUMN["seed_hi"]] = words


def set_masked(table: np.ndarray, row: int, masked: bool) -> None:
    """Say whether row ``row``'s token mask is in force, from the next gathered step on."""
    table[row, COLUMN["use_mask"]] = int(masked)
    if masked:
        table[row, COLUMN["features"]] |= int(Feature.MASK)
    else:
        table[row, COLUMN["features"]] &= ~int(Feature.MASK)


def step_features(packed: np.ndarray) -> Feature:
    """The union of the features of a step's rows, int32[R, NUM_COLUMNS]. NONE: the greedy program will do."""
    return Feature(int(np.bitwise_or.reduce(packed[:, COLUMN["features"]], initial=0)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingMetadata:
    """How to sample one step's R rows: always the same two arrays, so all mixes share a program.

    Rows that sample nothing in this step (padding, unfinished prompts) are padding rows: row id
    ``max_num_seqs``, greedy, no features. They get a token that nobody reads, and change no state.
    """

    packed: jax.Array
    """int32[R, NUM_COLUMNS]: the gathered rows of the host's table, read through the properties below.

    Columns are cut out where they are used: a branch takes one operand instead of fourteen.
    """
    step_features: jax.Array
    """int32[]: the union of ``features``; work that no row asks for is skipped."""

    @classmethod
    def from_packed(cls, packed: jax.Array, step_features: jax.Array) -> SamplingMetadata:
        """From what the host sent: a step's gathered table and its ``step_features``."""
        return cls(packed, step_features)

    def any(self, features: Feature) -> jax.Array:
        """bool[]: whether any row asks for any of ``features``."""
        return (self.step_features & int(features)) != 0

    def rows_with(self, features: Feature) -> jax.Array:
        """bool[R]: which rows ask for any of ``features``."""
        return (self.features & int(features)) != 0

    def _column(self, name: str) -> jax.Array:
        index = COLUMN[name]
        return lax.bitcast_convert_type(self.packed[:, index], jnp.dtype(COLUMNS[index].dtype))

    @property
    def row_ids(self) -> jax.Array:
        """int32[R]: the persistent row of each batch row, unique; ``max_num_seqs`` for padding rows."""
        return self._column("row_ids")

    @property
    def positions(self) -> jax.Array:
        """int32[R]: index of the token being sampled in its request. With the seed it is the random key."""
        return self._column("positions")

    @property
    def features(self) -> jax.Array:
        """int32[R]: ``Feature`` bits of each row."""
        return self._column("features")

    @property
    def seed_lo(self) -> jax.Array:
        """uint32[R]: the lower half of the request's seed."""
        return self._column("seed_lo")

    @property
    def seed_hi(self) -> jax.Array:
        """uint32[R]: the upper half."""
        return self._column("seed_hi")

    @property
    def temperature(self) -> jax.Array:
        """float32[R]: 0 is greedy."""
        return self._column("temperature")

    @property
    def top_k(self) -> jax.Array:
        """int32[R]: 0 is off."""
        return self._column("top_k")

    @property
    def top_p(self) -> jax.Array:
        """float32[R] in (0, 1]: 1 is off."""
        return self._column("top_p")

    @property
    def min_p(self) -> jax.Array:
        """float32[R] in [0, 1], relative to the most likely token: 0 is off."""
        return self._column("min_p")

    @property
    def presence_penalty(self) -> jax.Array:
        """float32[R]: 0 is off."""
        return self._column("presence_penalty")

    @property
    def frequency_penalty(self) -> jax.Array:
        """float32[R]: 0 is off."""
        return self._column("frequency_penalty")

    @property
    def repetition_penalty(self) -> jax.Array:
        """float32[R] > 0: 1 is off."""
        return self._column("repetition_penalty")

    @property
    def num_bias(self) -> jax.Array:
        """int32[R]: entries of the row's bias table that count."""
        return self._column("num_bias")

    @property
    def use_mask(self) -> jax.Array:
        """int32[R]: 1 where the row's token mask is in force."""
        return self._column("use_mask")

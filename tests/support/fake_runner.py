"""FakeRunner: a ModelRunner without a device that simulates the KV cache and refuses what a device would get
wrong.

Each slot of the simulated cache holds a fingerprint of the whole sequence up to its position, as keys and
values do. Before a step is "computed", every position that its rows see is read back through their block
tables and must hold the row's own sequence: a wrong hit, a block handed out twice or a lost token shows at
once. Tokens are a hash of the sequence, so they do not depend on what else is in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxserve.kv_cache_spec import KVCacheGroup, KVCacheSpec
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import (
    BurstLimits,
    ModelRunnerOutput,
    NewRequestData,
    RunnerInfo,
    SchedulerOutput,
    TokenLogprobs,
)

_MASK = (1 << 64) - 1
GENERATED = 1 << 40
"""Added to a generated token's id where paths are separate: decoding leaves other keys and values than a chunk."""
POISON = -1
"""Content of a slot that a failed step left."""


def full_attention_group() -> KVCacheGroup:
    return KVCacheGroup((0,), KVCacheSpec(1, 64, "float32", 4))


def sliding_window_group(window: int) -> KVCacheGroup:
    return KVCacheGroup((1,), KVCacheSpec(1, 64, "float32", 4, sliding_window=window))


def fingerprint(before: int, token_id: int) -> int:
    """Of a sequence that ends with ``token_id``, given the fingerprint of what comes before (0 at the
    start)."""
    mixed = (before ^ (token_id + 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93 & _MASK
    return mixed ^ (mixed >> 29)


def next_token(fingerprint_: int, seed: int, vocab_size: int) -> int:
    """The token that follows a sequence."""
    return (fingerprint(fingerprint_, seed) >> 13) % vocab_size


@dataclass
class FakeRow:
    """One request in the batch, as the device knows it: tokens that the host has not read are there too."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    needs_sync: bool
    block_tables: list[list[int]]
    num_computed_tokens: int
    data_rank: int
    num_unread_tokens: int = 0
    failed: bool = False
    separate_paths: bool = False
    mask: np.ndarray | None = None
    """Of a grammar, for the token being sampled."""
    fingerprints: list[int] = field(default_factory=list)

    @classmethod
    def from_new(cls, new: NewRequestData, separate_paths: bool) -> FakeRow:
        row = cls(
            request_id=new.request_id,
            token_ids=[],
            num_prompt_tokens=new.num_prompt_tokens,
            params=new.sampling_params,
            seed=0 if new.sampling_params.greedy else new.seed,
            stop_token_ids=frozenset(new.stop_token_ids),
            needs_sync=any(len(form) > 1 for form in new.bad_words_token_ids),
            block_tables=[list(table) for table in new.block_ids],
            num_computed_tokens=new.num_computed_tokens,
            data_rank=new.data_rank,
            separate_paths=separate_paths,
        )
        for token_id in new.token_ids:
            row.append(token_id)
        return row

    def append(self, token_id: int) -> None:
        generated = self.separate_paths and len(self.token_ids) >= self.num_prompt_tokens
        self.token_ids.append(token_id)
        before = self.fingerprints[-1] if self.fingerprints else 0
        self.fingerprints.append(fingerprint(before, token_id + GENERATED * generated))


def default_sampler(row: FakeRow, vocab_size: int) -> int:
    """``next_token``, with stop ids masked before ``min_tokens`` and only allowed ids, as the device's
    sampler."""
    masked = row.stop_token_ids
    if len(row.token_ids) - row.num_prompt_tokens >= row.params.min_tokens:
        masked = frozenset()
    allowed = list(row.params.allowed_token_ids or range(vocab_size))
    if row.mask is not None:
        allowed = [i for i in allowed if row.mask[i // 32] >> (i % 32) & 1]
        masked = masked if set(allowed) - masked else frozenset()
    start = next_token(row.fingerprints[-1], row.seed, len(allowed))
    for i in range(len(allowed)):
        token_id = allowed[(start + i) % len(allowed)]
        if token_id not in masked:
            return token_id
    raise AssertionError("every allowed token is masked")


class FakePendingStep:
    """A dispatched step; its results can be read once, in order."""

    def __init__(self, runner: FakeRunner, output: ModelRunnerOutput, rows: list[FakeRow]) -> None:
        self._runner, self._output, self._rows = runner, output, rows
        self._ready_at = time.monotonic() + runner.step_seconds

    def result(self) -> ModelRunnerOutput:
        unread = self._runner.unread
        assert self in unread[:1], "steps must be read once and in order"
        unread.pop(0)
        for row in self._rows:
            row.num_unread_tokens -= 1
        if (delay := self._ready_at - time.monotonic()) > 0:
            time.sleep(delay)
        return self._output


class FakeRunner:
    """See the module. Every refused step raises AssertionError.

    Args:
        num_blocks, block_size, groups, max_model_len: as the scheduler got them; blocks of each rank.
        vocab_size: tokens are in [0, vocab_size).
        max_num_seqs, max_num_batched_tokens: limits of each rank, checked if given.
        sampler: next token of a row; the default hashes the sequence.
        step_seconds: a step's results are ready so long after it was dispatched.
        check: simulate and check the cache; off for measuring the host.
        data_parallel_size: ranks; each has its own cache.
        separate_paths: decoding rows leave other keys and values, and prompts must not be computed by them.
        bursts: what it takes of them.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        groups: list[KVCacheGroup] | None = None,
        max_model_len: int = 1024,
        vocab_size: int = 1000,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        sampler: Callable[[FakeRow, int], int] = default_sampler,
        step_seconds: float = 0.0,
        check: bool = True,
        data_parallel_size: int = 1,
        separate_paths: bool = False,
        bursts: BurstLimits | None = None,
    ) -> None:
        self.separate_paths, self.bursts = separate_paths, bursts
        self.num_bursts = 0
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.groups = groups or [full_attention_group()]
        self.max_model_len = max_model_len
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.sampler, self.step_seconds, self.check = sampler, step_seconds, check
        self.data_parallel_size = data_parallel_size
        self.rows: dict[str, FakeRow] = {}
        self.caches = self._empty_caches()
        """Of each rank, per block and slot: (group, fingerprint)."""
        self.unread: list[FakePendingStep] = []
        self.failures: dict[str, str] = {}
        """Request id to reason: its part of the next step with it fails, and leaves rubbish in its slots."""
        self.num_steps = 0
        self.has_recovered = False
        """Until the next step, which may still name rows that were lost."""
        self.closed = False

    def _empty_caches(self) -> list[list[list[tuple[int, int] | None]]]:
        ranks, blocks = range(self.data_parallel_size), range(self.num_blocks)
        return [[[None] * self.block_size for _ in blocks] for _ in ranks]

    def initialize(self) -> RunnerInfo:
        return RunnerInfo(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            kv_cache_groups=self.groups,
            kv_cache_bytes=self.data_parallel_size
            * self.num_blocks
            * sum(group.spec.bytes_per_block(self.block_size) for group in self.groups),
            num_programs=0,
            device="fake",
            data_parallel_size=self.data_parallel_size,
            separate_paths=self.separate_paths,
            bursts=self.bursts,
        )

    def recover(self) -> None:
        self.rows.clear()
        self.unread.clear()
        self.caches = self._empty_caches()
        self.has_recovered = True

    def num_compilations(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def execute(self, scheduler_output: SchedulerOutput) -> FakePendingStep:
        assert not self.closed, "the runner is closed"
        assert scheduler_output.num_scheduled_tokens, "a step without tokens is not executed"
        self._update_batch(scheduler_output)
        if self.check:
            if scheduler_output.num_decode_steps > 1:
                self._check_burst(scheduler_output)
            else:
                self._check_rows(scheduler_output)
            self._check_blocks(scheduler_output)
            self._read_cache(scheduler_output)
        return self._compute(scheduler_output)

    # --- the batch ------------------------------------------------------------------------------------------

    def _update_batch(self, step: SchedulerOutput) -> None:
        leaving = step.finished_request_ids + step.preempted_request_ids
        assert len(leaving) == len(set(leaving)), f"leaves twice: {leaving}"
        for request_id in leaving:
            row = self.rows.pop(request_id, None)
            assert row or self.has_recovered, f"{request_id} leaves, but is not in the batch"
        self.has_recovered = False
        for new in step.new_requests:
            assert new.request_id not in self.rows, f"{new.request_id} is new, but is in the batch"
            assert new.request_id in step.num_scheduled_tokens, f"{new.request_id} is new, but gets no tokens"
            assert 0 < new.num_prompt_tokens <= len(new.token_ids)
            assert new.num_computed_tokens < len(new.token_ids), "the last token must be computed"
            assert 0 <= new.data_rank < self.data_parallel_size, f"{new.request_id}: no such rank"
            self.rows[new.request_id] = FakeRow.from_new(new, self.separate_paths)
        new_ids = {new.request_id for new in step.new_requests}
        for cached in step.cached_requests:
            row = self.rows[cached.request_id]
            assert cached.request_id not in new_ids, f"{cached.request_id} is new and cached"
            assert cached.request_id in step.num_scheduled_tokens, f"{cached.request_id} grows without tokens"
            assert cached.num_computed_tokens == row.num_computed_tokens, "runner and scheduler disagree"
            assert len(cached.new_block_ids) == len(self.groups)
            assert any(cached.new_block_ids), "a request without new blocks is not listed"
            for table, new_blocks in zip(row.block_tables, cached.new_block_ids, strict=True):
                table.extend(new_blocks)
        for request_id, token_ids in step.appended_token_ids.items():
            row = self.rows[request_id]
            assert request_id not in new_ids, f"{request_id} is new and brings its tokens itself"
            assert not row.num_unread_tokens, f"{request_id}: tokens are appended to one that was not read"
            assert len(token_ids) > 1, f"{request_id}: nothing was appended"
            assert row.token_ids[row.num_computed_tokens :] == token_ids[:1]
            for token_id in token_ids[1:]:
                row.append(token_id)

    def _check_rows(self, step: SchedulerOutput) -> None:
        scheduled = step.num_scheduled_tokens
        for rank in range(self.data_parallel_size):
            if self.max_num_batched_tokens is not None:
                num_tokens = sum(num for id_, num in scheduled.items() if self.rows[id_].data_rank == rank)
                assert num_tokens <= self.max_num_batched_tokens, f"rank {rank}: over the token budget"
            if self.max_num_seqs is not None:
                num_rows = sum(row.data_rank == rank for row in self.rows.values())
                assert num_rows <= self.max_num_seqs, f"rank {rank}: too many rows"
        ranks = [self.rows[request_id].data_rank for request_id in scheduled]
        decode, others = ranks[: step.num_decode_rows], ranks[step.num_decode_rows :]
        assert (decode, others) == (sorted(decode), sorted(others)), "rows are not in the order of ranks"
        by_rank = tuple(map(decode.count, range(self.data_parallel_size)))
        assert step.num_decode_rows_by_rank == by_rank, "num_decode_rows_by_rank is wrong"
        assert step.samples <= scheduled.keys()
        for index, (request_id, num_tokens) in enumerate(scheduled.items()):
            row = self.rows[request_id]
            end = row.num_computed_tokens + num_tokens
            assert num_tokens > 0
            assert end <= len(row.token_ids), f"{request_id}: tokens {end} of {len(row.token_ids)}"
            samples = end == len(row.token_ids)
            assert samples == (request_id in step.samples), f"{request_id}: samples is wrong"
            decodes = samples and num_tokens == 1
            if self.separate_paths:
                decodes = row.num_computed_tokens >= row.num_prompt_tokens
                most = 1 if decodes else row.num_prompt_tokens - row.num_computed_tokens
                assert num_tokens <= most, f"{request_id}: two paths in one step"
                assert (decodes and not samples) == (request_id in step.replayed_request_ids)
            assert (index < step.num_decode_rows) == decodes, f"{request_id}: row order"
            assert end < self.max_model_len, f"{request_id}: grows beyond max_model_len"
            assert not (row.needs_sync and row.num_unread_tokens), (
                f"{request_id}: scheduled before it was read"
            )

    def _check_burst(self, step: SchedulerOutput) -> None:
        limits, scheduled = self.bursts, step.num_scheduled_tokens
        assert limits is not None, "nobody takes bursts"
        assert step.num_decode_steps <= limits.num_steps
        assert len(scheduled) <= len(self.rows) <= limits.max_rows
        others = (step.new_requests, step.appended_token_ids, step.token_masks, step.replayed_request_ids)
        assert not any(others), "more than decoding in a burst"
        assert step.samples == scheduled.keys()
        assert (step.num_decode_rows,) == step.num_decode_rows_by_rank == (len(scheduled),)
        tokens = list(scheduled.values())
        assert tokens == sorted(tokens, reverse=True), "rows are not in descending order"
        assert tokens[0] == step.num_decode_steps
        draws: set[bool] = set()
        for request_id, num_tokens in scheduled.items():
            row, params = self.rows[request_id], self.rows[request_id].params
            assert num_tokens > 0
            assert row.num_computed_tokens == len(row.token_ids) - 1, f"{request_id}: does not decode"
            assert row.num_computed_tokens + num_tokens < self.max_model_len, f"{request_id}: grows too long"
            asks = (
                row.needs_sync, row.mask is not None, params.logprobs is not None, params.logit_bias,
                params.prompt_logprobs is not None, params.needs_penalties, params.allowed_token_ids, params.min_tokens,
            )  # fmt: skip
            assert not any(asks), f"{request_id}: asks for what no burst has"
            if not params.greedy and params.top_k != 1:
                assert params.top_k <= limits.max_top_k
                draws.add(params.top_k > 0)
        assert len(draws) <= 1, "two ways to draw in one burst"

    def _check_blocks(self, step: SchedulerOutput) -> None:
        """Ids in range; blocks in the visible part of every table; a block that is written to is nobody
        else's."""
        seen_by: dict[tuple[int, int], list[str]] = {}
        for row in self.rows.values():
            assert len({len(table) for table in row.block_tables}) == 1, "tables differ in length"
            num_tokens = step.num_scheduled_tokens.get(row.request_id, 0)
            end = row.num_computed_tokens + num_tokens
            assert end <= len(row.block_tables[0]) * self.block_size, f"{row.request_id}: too few slots"
            for group, table in zip(self.groups, row.block_tables, strict=True):
                visible = table[self._first_visible(group, row.num_computed_tokens) // self.block_size :]
                assert all(0 < block < self.num_blocks for block in visible), f"{row.request_id}: {table}"
                assert all(0 <= block < self.num_blocks for block in table)
                for block in visible:
                    seen_by.setdefault((row.data_rank, block), []).append(row.request_id)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = self.rows[request_id]
            for table in row.block_tables:
                for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
                    owners = seen_by[row.data_rank, table[position // self.block_size]]
                    assert owners == [request_id], f"block {table[position // self.block_size]}: {owners}"

    def _first_visible(self, group: KVCacheGroup, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        window = group.spec.sliding_window
        return 0 if window is None else max(0, position - window + 1)

    # --- the simulated cache --------------------------------------------------------------------------------

    def _read_cache(self, step: SchedulerOutput) -> None:
        """What earlier steps wrote must be the row's own sequence, at every position that the step sees."""
        for request_id in step.num_scheduled_tokens:
            row = self.rows[request_id]
            if row.failed:
                continue  # the scheduler has not read it yet
            for index, (group, table) in enumerate(zip(self.groups, row.block_tables, strict=True)):
                start = self._first_visible(group, row.num_computed_tokens)
                cache = self.caches[row.data_rank]
                for position in range(start, row.num_computed_tokens):
                    found = cache[table[position // self.block_size]][position % self.block_size]
                    expected = (index, row.fingerprints[position])
                    assert found == expected, f"{request_id}: another sequence at position {position}"

    def _write_cache(self, row: FakeRow, num_tokens: int, failed: bool) -> None:
        for index, table in enumerate(row.block_tables):
            for position in range(row.num_computed_tokens, row.num_computed_tokens + num_tokens):
                value = POISON if failed else row.fingerprints[position]
                block = self.caches[row.data_rank][table[position // self.block_size]]
                block[position % self.block_size] = (index, value)

    def _compute(self, step: SchedulerOutput) -> FakePendingStep:
        # Shapes are powers of two.
        padded = 1 << (step.total_num_scheduled_tokens - 1).bit_length()
        output = ModelRunnerOutput(step.step_id, num_padded_tokens=padded)
        sampling: list[FakeRow] = []
        if step.num_decode_steps > 1:
            self.num_bursts += 1
            rows = len(step.num_scheduled_tokens)
            output.num_padded_tokens = step.num_decode_steps << (rows - 1).bit_length()
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = self.rows[request_id]
            reason = self.failures.pop(request_id, None)
            if step.num_decode_steps > 1:
                sampling += self._decode(row, num_tokens, output, reason)
                continue
            if self.check:
                self._write_cache(row, num_tokens, failed=reason is not None)
            if reason is not None:
                row.failed = True
                output.failed[request_id] = reason
            elif row.params.prompt_logprobs is not None:
                self._score_prompt(row, num_tokens, output)
            row.num_computed_tokens += num_tokens
            if request_id in step.samples:
                mask = step.token_masks.get(request_id)
                row.mask = None if mask is None else mask.words()
                self._sample(row, output)
                sampling.append(row)
        self.num_steps += 1
        pending = FakePendingStep(self, output, sampling)
        self.unread.append(pending)
        return pending

    def _decode(
        self, row: FakeRow, num_tokens: int, output: ModelRunnerOutput, reason: str | None
    ) -> list[FakeRow]:
        """A row's part of a burst; the row once for each token that it samples."""
        if reason is not None:
            row.failed = True
            output.failed[row.request_id] = reason
        for _ in range(num_tokens):
            if self.check:
                self._write_cache(row, 1, failed=reason is not None)
            row.num_computed_tokens += 1
            self._sample(row, output)
        return [row] * num_tokens

    def _sample(self, row: FakeRow, output: ModelRunnerOutput) -> None:
        token_id = self.sampler(row, self.vocab_size)
        row.append(token_id)
        row.num_unread_tokens += 1
        if row.request_id in output.failed:
            return
        output.sampled_token_ids.setdefault(row.request_id, []).append(token_id)
        if row.params.logprobs is not None:
            logprobs = self._logprobs(token_id, row.params.logprobs, len(row.token_ids) - 1)
            output.logprobs[row.request_id] = [logprobs]

    def _score_prompt(self, row: FakeRow, num_tokens: int, output: ModelRunnerOutput) -> None:
        end = min(row.num_computed_tokens + num_tokens, row.num_prompt_tokens - 1)
        scored = [
            self._logprobs(row.token_ids[position], row.params.prompt_logprobs or 0, position)
            for position in range(row.num_computed_tokens + 1, end + 1)
        ]
        if scored:
            output.prompt_logprobs[row.request_id] = scored

    def _logprobs(self, token_id: int, count: int, position: int) -> TokenLogprobs:
        """The chosen token's log probability is minus its position."""
        others = range(self.vocab_size if count == -1 else count)
        return TokenLogprobs(
            [token_id, *others], [-float(position), *(-float(i + 1) for i in others)], rank=token_id + 1
        )

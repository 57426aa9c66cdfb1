"""Buckets, the packed buffer and the batch builder: what the host sends for each kind of step."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.buckets import Bucket, BucketTable
from jaxserve.runner.burst_program import fields_at
from jaxserve.runner.input_batch import InputBatch
from jaxserve.runner.program_variants import (
    SAMPLERS,
    ProgramStyle,
    StepVariant,
    head_variants,
    step_variants,
)
from jaxserve.runner.programs import StepPrograms
from jaxserve.runner.step_layout import FROM_DEVICE
from jaxserve.sampling.metadata import ALL_FEATURES, COLUMN, Feature
from jaxserve.sampling_params import SamplingParams
from jaxserve.step import BurstLimits, CachedRequestData, NewRequestData, SchedulerOutput

pytestmark = pytest.mark.device

S = 16
BLOCK = 8


@pytest.fixture
def builder() -> BatchBuilder:
    return BatchBuilder(BucketTable.build(64, S), BLOCK, S)


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(S, vocab_size=100)


def new_request(
    request_id: str, token_ids: list[int], *, computed: int = 0, prompt: int | None = None, **params
):
    blocks = list(range(1, 2 + len(token_ids) // BLOCK))
    return NewRequestData(
        request_id, token_ids, prompt or len(token_ids), SamplingParams(temperature=0, **params), 7, [], [], [blocks],
        computed,
    )  # fmt: skip


def step(scheduled: dict[str, int], decode: int, samples: set[str]) -> SchedulerOutput:
    return SchedulerOutput(0, num_scheduled_tokens=scheduled, num_decode_rows=decode, samples=samples)


def test_buckets_grow_by_powers_of_two():
    table = BucketTable.build(100, 16)
    assert [b.num_tokens for b in table.buckets] == [1, 8, 16, 32, 64, 100]
    assert [b.num_rows for b in table.buckets] == [1, 8, 16, 16, 16, 16]
    assert table.smallest(1, 1) == Bucket(1, 1)
    assert table.smallest(9, 2) == Bucket(16, 16)
    assert table.smallest(100, 16) == Bucket(100, 16)
    with pytest.raises(ValueError, match="101"):
        table.smallest(101, 1)
    assert BucketTable.build(1, 1).buckets == (Bucket(1, 1),)


@pytest.mark.parametrize("budget", [1, 7, 8, 9, 512, 1000])
def test_the_number_of_programs_is_linear(budget):
    table = BucketTable.build(budget, min(budget, 64))
    assert len(step_variants(table, ProgramStyle.of("cpu"))) == len(table.buckets)
    split = BucketTable.build(budget, min(budget, 64), decode_programs=True)
    for platform in ("gpu", "tpu"):
        variants = step_variants(split, ProgramStyle.of(platform))
        heads = head_variants(variants)
        assert len(variants) <= 4 * len(split.buckets)
        assert len(heads) <= 3 * len(split.decode)
        assert (not heads) is (platform == "tpu")


def test_a_mixed_step(builder, batch):
    batch.add(new_request("decoding", [5] * 9))
    builder.build(batch, step({"decoding": 9}, 0, {"decoding"}))
    batch.add(new_request("prompt", list(range(10, 30))))
    built = builder.build(batch, step({"decoding": 1, "prompt": 12}, 1, {"decoding"}))
    fields = builder.layouts[built.bucket].split(built.buffer)
    assert built.bucket == Bucket(16, 16)
    assert fields["token_ids"].tolist() == [FROM_DEVICE, *range(10, 22), 0, 0, 0]
    assert fields["query_start_loc"].tolist() == [0, 1, 13] + [13] * 14
    assert fields["num_computed_tokens"][:3].tolist() == [9, 0, 0]
    assert fields["row_index"].tolist() == [0, 1] + [S] * 14
    assert fields["distribution"].tolist() == [1, 1, 2]
    sampling = fields["sampling"]
    assert sampling[:, COLUMN["row_ids"]].tolist() == [0] + [S] * 15, "an unfinished prompt samples nothing"
    assert sampling[0, COLUMN["positions"]] == 10
    assert batch.num_computed_tokens[:2].tolist() == [10, 12], "advanced by what is scheduled, not by the pad"


def test_a_resumed_request_sends_its_known_output_tokens(builder, batch):
    batch.add(new_request("resumed", [1, 2, 3, 4, 5], prompt=3))
    built = builder.build(batch, step({"resumed": 5}, 0, {"resumed"}))
    fields = builder.layouts[built.bucket].split(built.buffer)
    assert fields["token_ids"][:5].tolist() == [1, 2, 3, 4, 5]
    assert fields["sampling"][0, COLUMN["positions"]] == 5


def test_the_last_token_of_a_cached_prompt_is_known_to_the_host(builder, batch):
    batch.add(new_request("cached", list(range(20, 37)), computed=16))
    built = builder.build(batch, step({"cached": 1}, 1, {"cached"}))
    assert built.bucket == Bucket(1, 1)
    assert builder.layouts[built.bucket].split(built.buffer)["token_ids"].tolist() == [36]


def test_patches_travel_once_and_overflow_goes_first(builder, batch):
    layout = builder.layouts[Bucket(1, 1)]
    many = layout.num_patches + 5
    request = new_request("long", [1])
    request.block_ids[0][:] = range(100, 100 + many)
    batch.add(request)
    built = builder.build(batch, step({"long": 1}, 1, {"long"}))
    assert built.early_patches.columns == list(range(5))
    fields = layout.split(built.buffer)
    assert fields["patch_columns"].tolist() == list(range(5, many))
    assert fields["patch_blocks"].tolist() == list(range(105, 100 + many))
    batch.extend(CachedRequestData("long", [[7]], 1))
    built = builder.build(batch, step({"long": 1}, 1, {"long"}))
    fields = layout.split(built.buffer)
    assert (fields["patch_rows"] < S).sum() == 1
    assert (fields["patch_columns"][0], fields["patch_blocks"][0]) == (many, 7)


def test_rows_are_reused_and_unknown_ids_ignored(batch):
    first = batch.add(new_request("a", [1])).row
    batch.remove("a")
    batch.remove("a")
    assert batch.add(new_request("b", [1])).row == first
    assert len(batch.free_rows) == S - 1


def test_padding_writes_and_samples_nothing(builder):
    for bucket, layout in builder.layouts.items():
        fields = layout.split(builder.padding(bucket))
        assert (fields["query_start_loc"] == 0).all()
        assert (fields["patch_rows"] == S).all()
        assert (fields["sampling"][:, COLUMN["row_ids"]] == S).all()
        assert sum(f.size for f in fields.values()) == layout.size
        assert np.shares_memory(fields["token_ids"], builder.padding(bucket)) is False


def test_prompts_share_the_smallest_buckets_where_decode_steps_have_their_own_programs():
    table = BucketTable.build(1024, 256, decode_programs=True)
    assert [bucket.num_tokens for bucket in table.mixed] == [64, 128, 256, 512, 1024]
    assert [bucket.num_tokens for bucket in table.decode] == [1, 8, 16, 32, 64, 128, 256]
    assert table.smallest(3, 3, decode_only=True) == Bucket(8, 8)
    assert table.smallest(3, 3) == Bucket(64, 64)
    assert table.smallest(70, 1) == Bucket(128, 128)
    assert table.smallest(300, 200) == Bucket(512, 256)
    fine = BucketTable.build(3000, 400, decode_programs=True, fine=True)
    sizes = [bucket.num_tokens for bucket in fine.mixed]
    assert sizes == [64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3000]
    assert fine.costly_sizes == (256, 384, 512, 768, 1024, 1536, 2048, 3000)
    trimmed = BucketTable.build(8192, 256, decode_programs=True, fine=True, trimmed=True)
    assert trimmed.costly_sizes == (256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
    assert BucketTable.build(1024, 256).costly_sizes == ()
    assert [bucket.num_tokens for bucket in fine.decode] == [1, 8, 16, 32, 64, 128, 192, 256, 384, 400]


@pytest.mark.parametrize(
    "budget,rows", [(1, 1), (16, 4), (32, 8), (100, 7), (64, 64), (1000, 100), (8192, 1024)]
)
def test_every_step_within_the_budget_has_a_program(budget, rows):
    for platform in ("cpu", "tpu", "gpu"):
        style = ProgramStyle.of(platform)
        fixed = style.fixed_addresses
        table = BucketTable.build(budget, rows, decode_programs=style.decode_programs, fine=fixed)
        programs = set(variants := step_variants(table, style))
        heads = head_variants(variants)
        for num_rows in range(1, min(rows, budget) + 1):
            for features in SAMPLERS if style.decode_programs else ():
                bucket = table.smallest(num_rows, num_rows, decode_only=True)
                assert StepVariant(bucket, Feature.NONE if fixed else features, True, fixed) in programs
                assert not fixed or any(h.num_rows >= num_rows and h.features == features for h in heads)
            for num_tokens in {num_rows, (num_rows + budget) // 2, budget}:
                bucket = table.smallest(num_tokens, num_rows)
                assert StepVariant(bucket, Feature.NONE if fixed else ALL_FEATURES, False, fixed) in programs
                assert bucket.num_rows >= num_rows
                assert bucket.num_tokens >= num_tokens


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_the_most_special_programs_are_chosen(platform):
    style = ProgramStyle.of(platform)
    table = BucketTable.build(64, S, decode_programs=style.decode_programs)
    programs = object.__new__(StepPrograms)
    programs.builder, programs._options = BatchBuilder(table, BLOCK, S), {}
    variants = step_variants(table, style)
    programs.heads = head_variants(variants)
    for bucket in table.buckets:
        for decode_only in (True, False):
            for features in (Feature.NONE, Feature.TOP_K, Feature.RANDOM, Feature.TOP_K | Feature.LOGPROBS):
                for num_rows in (bucket.num_rows, 1, 1 + bucket.num_rows // 2):
                    step, head = programs.choose(
                        bucket, num_rows, features=int(features), decode_only=decode_only
                    )
                    decodes = decode_only and bucket in table.decode
                    assert (step.bucket, step.decode_only, step.fixed) == (
                        bucket,
                        decodes,
                        style.fixed_addresses,
                    )
                    assert step in variants or bucket not in table.mixed
                    held = head.features if head else step.features
                    assert not features & ~held
                    if decodes or head:
                        assert held == next(each for each in reversed(SAMPLERS) if not features & ~each)
                    smaller = [each.num_rows for each in programs.heads if each.features == held]
                    assert (head is None) is (not smaller)
                    if head is not None:
                        assert head in programs.heads
                        assert head.num_rows == min(rows for rows in smaller if rows >= num_rows)


def test_a_burst_is_its_steps():
    """What the device makes of a burst's buffer for each of its steps is what the host would have sent for it alone."""
    table = BucketTable.build(64, S, decode_programs=True)
    builder = BatchBuilder(table, BLOCK, S, BurstLimits(4, max_rows=8, max_top_k=64))
    assert list(builder.burst_layouts) == [Bucket(1, 1), Bucket(8, 8)]
    tokens, batches = {"a": 4, "b": 4, "c": 2}, []
    for _ in range(2):
        batch = InputBatch(S, vocab_size=100)
        for index, request_id in enumerate(tokens):
            batch.add(new_request(request_id, list(range(5 + index)), computed=4 + index, seed=3))
        batches.append(batch)
    burst = SchedulerOutput(
        0, num_scheduled_tokens=tokens, num_decode_rows=3, samples=set(tokens), num_decode_steps=4
    )
    built = builder.build(batches[0], burst)
    fields = builder.burst_layouts[built.bucket].split(jnp.asarray(built.buffer))
    assert fields["live_rows"].tolist() == [3, 3, 2, 2]
    assert batches[0].num_computed_tokens[built.rows].tolist() == [8, 9, 8]
    for index, live in enumerate(fields["live_rows"]):
        names = list(tokens)[:live]
        alone = builder.build(
            batches[1], step(dict.fromkeys(names, 1), live, set(names)), bucket=Bucket(8, 8)
        )
        expected, found = builder.layouts[alone.bucket].split(alone.buffer), fields_at(fields, index)
        for name in ("query_start_loc", "num_computed_tokens", "token_ids", "sampling", "row_index"):
            stop = live + 1 if name == "query_start_loc" else live
            np.testing.assert_array_equal(
                found[name][:stop], expected[name][:stop], err_msg=f"{index} {name}"
            )
        assert found["query_start_loc"].tolist() == expected["query_start_loc"].tolist()
        assert found["distribution"].tolist() == expected["distribution"].tolist()


class Traffic:
    """Random steps of random requests, as a scheduler makes them: mostly the same rows decode again."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rows: dict[str, list[int]] = {}
        """Request id: tokens computed, tokens known or in flight."""
        self.made = 0
        self.order: list[str] = []

    def change(self, batches: list[InputBatch]) -> None:
        """What may happen between two steps."""
        rng = self.rng
        if len(self.rows) < S and rng.random() < (0.8 if not self.rows else 0.08):
            self.made += 1
            self.add(batches, f"r{self.made}")
        if self.rows and rng.random() < 0.04:
            request_id = rng.choice(list(self.rows))
            del self.rows[request_id]
            for batch in batches:
                batch.remove(request_id)
            if rng.random() < 0.5:
                self.add(batches, request_id)
        if self.rows and rng.random() < 0.05:
            request_id, masked = rng.choice(list(self.rows)), rng.random() < 0.5
            for batch in batches:
                batch.set_masked(batch.row_of[request_id], masked)
        for request_id, (computed, _) in self.rows.items():
            if computed and rng.random() < 0.05:
                blocks = [rng.randrange(1, 99) for _ in range(rng.choice((1, 1, 9)))]
                for batch in batches:
                    batch.extend(CachedRequestData(request_id, [blocks], computed))

    def add(self, batches: list[InputBatch], request_id: str) -> None:
        rng = self.rng
        num_known = rng.choice((1, 1, 2, 5, 20))
        num_computed = rng.randrange(num_known)
        self.rows[request_id] = [num_computed, num_known]
        tokens = [rng.randrange(99) for _ in range(num_known)]
        request = new_request(request_id, tokens, computed=num_computed, logprobs=rng.choice((None, 2)))
        for batch in batches:
            batch.add(request)

    def step(self, batches: list[InputBatch]) -> SchedulerOutput | None:
        rng = self.rng
        decoding: dict[str, int] = {}
        others: dict[str, int] = {}
        replayed: set[str] = set()
        samples: set[str] = set()
        if rng.random() < 0.1:
            self.order = rng.sample(list(self.rows), len(self.rows))
        order = [i for i in self.order if i in self.rows] + [i for i in self.rows if i not in self.order]
        skips = rng.random() < 0.1
        for request_id in order:
            computed, known = row = self.rows[request_id]
            missing = known - computed
            if skips and rng.random() < 0.3:
                continue
            if missing == 1 and rng.random() < 0.03:
                appended = [rng.randrange(99) for _ in range(3)]
                for batch in batches:
                    batch.append(request_id, appended)
                row[1] = known = computed + 3
                missing = 3
            if missing == 1:
                decoding[request_id] = 1
                if rng.random() < 0.02:
                    replayed.add(request_id)
            else:
                others[request_id] = rng.randrange(1, min(missing, 5) + 1)
            num_tokens = (decoding | others)[request_id]
            row[0] += num_tokens
            if row[0] == known:
                samples.add(request_id)
                row[1] += 1
        if not decoding and not others:
            return None
        num_steps = 1
        if not others and not replayed and len(decoding) <= 8 and rng.random() < 0.5:
            num_steps = 4
            shortest = rng.choice((4, 4, 4, 2))
            for request_id in decoding:
                decoding[request_id] = shortest if request_id == list(decoding)[-1] else num_steps
                row = self.rows[request_id]
                row[:] = [row[0] + decoding[request_id] - 1, row[1] + decoding[request_id] - 1]
        return SchedulerOutput(
            0, num_scheduled_tokens=decoding | others, num_decode_rows=len(decoding), samples=samples - replayed,
            replayed_request_ids=replayed, num_decode_steps=num_steps,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_a_step_like_the_last_one_is_built_like_any(seed):
    table = BucketTable.build(64, S, decode_programs=True)
    builder = BatchBuilder(table, BLOCK, S, BurstLimits(4, max_rows=8, max_top_k=64))
    traffic = Traffic(seed)
    batches = [InputBatch(S, vocab_size=100) for _ in range(2)]
    num_again = num_bursts_again = 0
    sent, as_sent = np.zeros(0, np.int32), []
    for _ in range(500):
        traffic.change(batches)
        scheduled = traffic.step(batches)
        if scheduled is None:
            continue
        batches[1].last_decode = None
        # A step that scores prompts is built for the general program, and ranks may need a larger bucket.
        decode_only = bucket = None
        if scheduled.num_decode_steps == 1:
            decode_only = traffic.rng.choice((None, None, None, None, False))
            bucket = traffic.rng.choice((None, None, None, None, Bucket(64, S)))
        last = batches[0].last_decode
        built, expected = (
            builder.build(batch, scheduled, decode_only=decode_only, bucket=bucket) for batch in batches
        )
        again = last is not None and batches[0].last_decode is last
        num_again += again
        num_bursts_again += again and scheduled.num_decode_steps > 1
        assert built.buffer.tolist() == expected.buffer.tolist()
        assert not np.shares_memory(built.buffer, sent), "the device may still read it"
        assert sent.tolist() == as_sent
        sent, as_sent = built.buffer, built.buffer.tolist()
        assert built.rows.tolist() == expected.rows.tolist()
        assert built.starts.tolist() == expected.starts.tolist()
        assert (built.bucket, built.request_ids, built.features) == (
            expected.bucket, expected.request_ids, expected.features,
        )  # fmt: skip
        assert built.early_patches == expected.early_patches
        assert batches[0].num_computed_tokens.tolist() == batches[1].num_computed_tokens.tolist()
    assert num_again > 15
    assert num_bursts_again > 2

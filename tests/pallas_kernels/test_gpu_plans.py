"""How the Hopper kernels cut a step's work: nothing twice, nothing left out, nothing for padding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import build_metadata

from pallas_kernels.ragged_paged_attention.gpu import _tuned
from pallas_kernels.ragged_paged_attention.gpu_decode_plan import DecodeConfig, Stretch, plan_decode
from pallas_kernels.ragged_paged_attention.gpu_prefill_plan import PrefillConfig, plan_prefill, tile_shape

pytestmark = pytest.mark.device

BLOCK = 16


def metadata_of(rows, num_rows=16, num_tokens=16):
    """Always of the same shapes, so that every example runs the same compiled operations."""
    width = 190
    tables = np.random.default_rng(0).integers(1, 999, (len(rows), width)).astype(np.int32)
    return build_metadata(rows, tables, num_tokens, num_rows, width, np.zeros(num_tokens, np.int32))


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=0, max_size=12),
    window=st.sampled_from([None, 1, 100, 1000]),
    device=st.sampled_from(
        [(1, 16, (64, 1, 4)), (2, 7, (128, 2, 32)), (8, 1, (64, 1, 4)), (8, 16, (128, 2, 32))]
    ),
)
def test_stretches_share_the_line(lengths, window, device):
    """Few devices: each compiles its own shapes."""
    kv_heads, num_sms, sizes = device
    config = DecodeConfig(step=sizes[0], ctas_per_sm=2, min_chunk=sizes[1], max_chunks=sizes[2])
    metadata = metadata_of([(n, 1) for n in lengths])
    plan = plan_decode(
        metadata, num_kv_heads=kv_heads, block_size=BLOCK, sliding_window=window, num_sms=num_sms, config=config
    )  # fmt: skip
    rows, stretches = np.asarray(plan.rows), np.asarray(plan.stretches)
    assert len(stretches) == max(num_sms * 2 // kv_heads, 1)
    expected = []
    for row, length in enumerate(lengths):
        oldest = 0 if window is None else max(length - window, 0)
        steps = range(oldest // config.step, -(-length // config.step))
        assert tuple(rows[row][:3]) == (length, steps.start, steps.stop)
        assert len({step // rows[row, 3] for step in steps}) <= config.max_chunks + 1
        expected += [(row, step) for step in steps]
    walked, owner = [], {}
    for index, stretch in enumerate(stretches):
        row, step = stretch[Stretch.ROW], stretch[Stretch.STEP]
        own = []
        for _ in range(stretch[Stretch.COUNT]):
            own.append((row, step))
            step += 1
            if step == rows[row, 2]:
                row, step = row + 1, rows[min(row + 1, len(rows) - 1), 1]
        walked += own
        if not own:
            continue
        (first_row, first_step), (_, last_step) = own[0], own[-1]
        np.testing.assert_array_equal(stretch[Stretch.FIRST_ROW : Stretch.FIRST_ROW + 4], rows[first_row])
        assert stretch[Stretch.LAST_STOP] == last_step + 1
        starts = first_step == rows[first_row, 1]
        assert starts or first_step % rows[first_row, 3] == 0, "stretches end at chunk borders"
        if starts:
            owner[first_row] = index
        owner |= {row: index for row, step in own if step == rows[row, 1]}
        assert stretch[Stretch.BEGINS_IN] == owner[first_row]
        tables = np.asarray(metadata.block_tables)
        per_step = config.step // BLOCK
        early = stretch[Stretch.EARLY :].reshape(config.stages + 1, 4 + per_step)
        for found, (row, step) in zip(early, own):
            at = np.minimum(step * per_step + np.arange(per_step), tables.shape[1] - 1)
            place = [row, step, rows[row, 0], rows[row, 2]]
            np.testing.assert_array_equal(found, [*place, *tables[row, at]])
    assert walked == expected
    chunks_in_all = sum(-(-(stop - start) // chunk) for _, start, stop, chunk in rows)
    sharing = max(min(len(stretches), chunks_in_all), min(len(stretches), max(num_sms // kv_heads, 1)))
    assert stretches[:, Stretch.COUNT].max() <= len(expected) / sharing + rows[:, 3].max(), (
        "equal but for a chunk"
    )


@settings(max_examples=12, deadline=None)
@given(
    decode=st.lists(st.integers(1, 400), max_size=4),
    rows=st.lists(st.tuples(st.integers(0, 700), st.integers(2, 300)), max_size=6),
    group=st.sampled_from([1, 2, 3, 4, 8, 12]),
    window=st.sampled_from([None, 1, 60, 500]),
    tight=st.booleans(),
)
def test_tiles_cover_every_query_once_or_with_the_same_result(decode, rows, group, window, tight):
    rows = [(n, 1) for n in decode] + [(cached + new, new) for cached, new in rows]
    live = sum(new for _, new in rows)
    metadata = metadata_of(rows, num_tokens=max(live, 128) if tight else 2048)
    config, size = PrefillConfig(), tile_shape(group).tokens_per_cta
    num_tokens = metadata.positions.shape[0]
    plan = plan_prefill(metadata, group=group, num_tokens=num_tokens, sliding_window=window, config=config)
    tiles, counts = np.asarray(plan.tiles), np.asarray(plan.counts)
    assert counts[1] == sum(new for _, new in rows)
    positions, row_ids = np.asarray(metadata.positions), np.asarray(metadata.row_ids)
    seen, costs = set(), []
    for row, first, begin, end, position, begin_step, unmasked_end, end_step in tiles[: counts[0]]:
        assert first >= 0
        assert first + size <= num_tokens, "a tile lies inside the array"
        assert 0 <= begin < end <= size
        mine = range(first + begin, first + end)
        assert {row_ids[t] for t in mine} == {row}
        assert [positions[t] for t in mine] == list(range(position + begin, position + end))
        new = rows[row][1]
        assert end - begin == min(new, size), "only rows shorter than a tile have partial ones"
        seen |= set(mine)
        oldest = 0 if window is None else max(position + begin - window + 1, 0)
        assert begin_step * config.step <= oldest
        assert end_step == -(-(position + end) // config.step)
        assert begin_step <= unmasked_end <= end_step
        if unmasked_end > begin_step:
            assert unmasked_end * config.step - 1 <= position + begin, (
                "every query sees all of an unmasked step"
            )
        costs.append(end_step - begin_step)
    assert seen == {t for t in range(counts[1]) if rows[row_ids[t]][1] > 1}
    assert costs == sorted(costs, reverse=True)


def test_padding_costs_nothing():
    metadata = metadata_of([], num_rows=9, num_tokens=200)
    decode = plan_decode(
        metadata, num_kv_heads=2, block_size=BLOCK, sliding_window=None, num_sms=4, config=DecodeConfig()
    )  # fmt: skip
    assert not np.asarray(decode.stretches)[:, Stretch.COUNT].any()
    prefill = plan_prefill(metadata, group=4, num_tokens=200, sliding_window=None, config=PrefillConfig())
    assert int(prefill.counts[0]) == 0


def test_the_tuning_table_knows_blocks():
    """A row's bits may depend on the block size, which is a server's, but not on the number of rows."""
    of = {block: DecodeConfig(**_tuned("decode", 128, 8, block)) for block in (16, 64, None)}
    assert of[16] != of[64] == of[None]
    assert DecodeConfig(**_tuned("decode", 128, 16, 16)) == of[64], "measured with 8 columns only"
    assert _tuned("decode", 128, 8, 16, narrow=True) == _tuned("decode", 128, narrow=True)


def test_tiles_of_every_group():
    for group in range(1, 17):
        shape = tile_shape(group)
        assert shape.tokens * shape.heads <= 64
        assert shape.tokens % 8 == 0
        assert shape.tokens & (shape.tokens - 1) == 0
        assert shape.heads * (1 if shape.splits_tokens else 2) >= group


def test_more_registers_than_there_are_is_refused():
    with pytest.raises(ValueError, match="registers"):
        PrefillConfig(consumer_registers=232, producer_registers=56)


def test_plans_are_int32():
    metadata = metadata_of([(100, 1), (90, 20)], num_tokens=40)
    plan = plan_decode(
        metadata, num_kv_heads=2, block_size=None, sliding_window=None, num_sms=4, config=DecodeConfig()
    )  # fmt: skip
    assert {x.dtype for x in (plan.rows, plan.stretches, plan.counters)} == {jnp.dtype(jnp.int32)}
    assert plan.stretches.shape[1] == Stretch.EARLY

"""What batch_invariant changes on each platform, and where it is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.runner.buckets import Bucket, BucketTable
from jaxserve.runner.invariance import FEWEST_ROWS, PINNED_PRODUCTS, Invariance
from pallas_kernels.dispatch import BlockedBackend
from pallas_kernels.rms_norm.dispatch import PLAIN, OnesNorm

pytestmark = pytest.mark.device
KERNELS = SimpleNamespace(name="mosaic_gpu", separate_paths=True, num_sms=132)


def model(**kinds: bool) -> Any:
    return SimpleNamespace(**{"has_experts": False, "has_latents": False, **kinds})


@pytest.mark.parametrize(
    "platform,kinds,backend,devices,message",
    [
        ("cpu", {}, BlockedBackend(fixed_order=True), 4, None),
        ("gpu", {}, KERNELS, 1, None),
        ("gpu", {}, KERNELS, 2, "one device, not for 2"),
        ("gpu", {}, BlockedBackend(), 1, "needs the Hopper kernels: too old"),
        ("gpu", {"has_experts": True}, KERNELS, 1, "this one has experts"),
        ("cpu", {"has_latents": True}, BlockedBackend(), 1, "this one has latent attention"),
        ("tpu", {}, KERNELS, 1, "not on this TPU"),
    ],
)
def test_it_is_refused_by_name(platform, kinds, backend, devices, message):
    why_not = Invariance(True, platform).why_not(model(**kinds), backend, "too old", devices)
    assert why_not is None if message is None else message in why_not


def test_off_changes_nothing():
    for platform in ("cpu", "gpu", "tpu"):
        off, kernel = Invariance(False, platform), object()
        assert off.rms_norm(KERNELS) is PLAIN
        assert off.dense_matmul(kernel) is kernel
        assert off.compiler_options == ()
        assert off.fewest_rows == 1
        assert not off.separate_paths(KERNELS)


def test_on_a_gpu():
    all_rows = object()
    kernel, on = SimpleNamespace(for_all_rows=lambda: all_rows), Invariance(True, "gpu")
    assert on.dense_matmul(kernel) is all_rows
    assert on.dense_matmul(None) is None
    assert Invariance(True, "gpu", product_kernel=False).dense_matmul(kernel) is None
    assert on.compiler_options == PINNED_PRODUCTS
    assert on.separate_paths(KERNELS)


def test_on_a_cpu():
    on, backend = Invariance(True, "cpu"), BlockedBackend(fixed_order=True)
    assert on.rms_norm(backend) == OnesNorm()
    assert on.compiler_options == ()
    assert not on.separate_paths(backend)


@pytest.mark.parametrize("most_tokens,most_rows", [(1, 1), (8, 4), (64, 1), (100, 7), (2048, 256)])
def test_no_step_of_a_gpu_has_fewer_rows(most_tokens, most_rows):
    table = BucketTable.build(most_tokens, most_rows, decode_programs=True, fewest_rows=FEWEST_ROWS)
    assert all(min(bucket.num_tokens, bucket.num_rows) >= FEWEST_ROWS for bucket in table.buckets)
    assert table.smallest(most_rows, most_rows, decode_only=True) in table.decode
    assert table.smallest(most_tokens, min(most_tokens, most_rows)) in table.mixed
    assert table.smallest(1, 1, decode_only=True) == Bucket(FEWEST_ROWS, FEWEST_ROWS)


def test_decoding_rows_have_no_sizes_of_their_own():
    """Of those, a library's products are not known to add up as those of prompts do."""
    table = BucketTable.build(
        8192, 1024, decode_programs=True, fine=True, trimmed=True, fewest_rows=FEWEST_ROWS, shared=True
    )
    rows = [bucket.num_tokens for bucket in table.decode]
    assert rows == [8, 16, 32, 64, 128, 256, 384, 512, 768, 1024]
    assert {size for size in rows if size >= 64} <= {bucket.num_tokens for bucket in table.mixed}

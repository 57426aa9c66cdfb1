"""A trace's kernels are added up by step, by name and by kind, with the gaps of each run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KERNELS = {
    "products": [
        "nvjet_sm90_tss_256x128_64x4_1x2_h_ssched_bz_coopA_TNT", "dense_matmul_mosaic_gpu_kernel",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>", "gemm_fusion_dot_general", "grouped_matmul_mosaic",
    ],
    "attention": ["paged_prefill_mosaic_gpu_kernel", "paged_decode_mosaic_gpu_kernel"],
    "fusions": [
        "fusion", "loop_slice_fusion", "input_reduce_fusion", "wrapped_add", "add_norm_mosaic_gpu_kernel",
        "split_heads_mosaic_gpu_kernel", "loop_dynamic_update_slice_fusion",
    ],
    "copies": ["MemcpyD2H", "Memset 0", "memcpy32_post", "copy", "input_transpose_fusion", "paged_update_mosaic"],
    "rest": ["all_reduce_norm", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "sort", "choose_experts"],
}  # fmt: skip
RUN = [
    ("nvjet_sm90_a", 0.0, 60.0),
    ("loop_slice_fusion_9_remat2", 60.0, 10.0),
    ("loop_slice_fusion_10", 75.0, 10.0),  # after a gap of 5
    ("paged_prefill_mosaic_gpu_kernel", 80.0, 20.0),  # half of the last one's time, too
    ("MemcpyD2H", 110.0, 1.0),  # after a gap of 10
]
"""Of one run, in us: two steps."""


@pytest.fixture
def profile_step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import profile_step

    return profile_step


@pytest.fixture
def shape(profile_step):
    return profile_step.shape_of(BENCHMARKS / "models" / "llama-8b")


def test_each_kernel_has_a_kind(profile_step):
    for kind, names in KERNELS.items():
        assert {name: profile_step.kind_of(name) for name in names} == dict.fromkeys(names, kind)


def test_prompts_are_reported_per_step(profile_step, shape, capsys):
    events = [(name, start + 1e5 * run, took) for run in range(3) for name, start, took in RUN]
    found = profile_step.report_prompts(
        1, 4096, [200e-6, 900e-6, 240e-6], [180e-6] * 3, [1e-5, 3e-5] * 3, events, 2, shape
    )
    assert found["steps"] == 2
    assert found["wall"] == pytest.approx(120)
    assert found["untraced"] == pytest.approx(90)
    assert found["busy"] == pytest.approx((111 - 5 - 10) / 2)
    assert found["gaps within"] == pytest.approx((5 + 10) / 2)
    assert found["kernels"] == pytest.approx(2.5)
    assert found["host"] == pytest.approx(20)
    assert found["kinds"] == pytest.approx({"products": 30, "fusions": 10, "attention": 10, "copies": 0.5})
    assert found["times"]["loop_slice_fusion"] == pytest.approx(10)
    assert found["counts"]["loop_slice_fusion"] == pytest.approx(1)
    json.dumps(found)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "1 x 4096 tokens, 2 steps: wall 120 us (90 untraced), busy 48, gaps 72 (8 between"
    )
    products, attention = (each / 2 for each in shape.prefill_operations(1, 4096))
    assert lines[0].split() == ["products", "30.0", "us", "59.4%", f"{products / 30e6:.0f}", "TFLOP/s"]
    assert sum(f"{attention / 10e6:.0f} TFLOP/s" in line for line in lines[1:3]) == 1
    floors = {name: 1e6 * each / 2 for name, each in shape.moving_floors(4096).items()}
    cache = floors.pop("cache")
    assert f"floor {sum(floors.values()):.1f} us (norms {floors['norms']:.1f}" in "".join(lines[1:3])
    assert f"copies          0.5 us    1.0%  floor {cache:.1f} us" in lines[3]
    assert [line.split()[-1] for line in lines[4:]] == ["nvjet_sm90_a", "loop_slice_fusion"]


def test_a_floor_moves_each_byte_once(profile_step, shape):
    from offline import BANDWIDTH, MATRIX_RATE

    floors = shape.moving_floors(1)
    assert floors["norms"] == 32 * 2 * 8 * 4096 / BANDWIDTH
    assert floors["activation"] == 32 * 2 * 3 * 14336 / BANDWIDTH
    assert floors["cache"] == 32 * 2 * 2 * 2 * 8 * 128 / BANDWIDTH
    assert shape.prefill_floor(2, 64) == sum(shape.prefill_operations(2, 64)) / MATRIX_RATE


def test_cases(profile_step, tmp_path, capsys):
    assert profile_step.scaled("64", 8) == "64"
    assert profile_step.scaled("16x2048", 8) == "16x256"
    assert profile_step.scaled("1x4", 8) == "1x1"
    assert profile_step.shape_of(tmp_path) is None
    assert "are left out: FileNotFoundError" in capsys.readouterr().out
    profile_step.print_kinds({"products": 3.0, "rest": 1.0}, 1, 8, 1, None)
    assert capsys.readouterr().out.split() == ["products", "3.0", "us", "75.0%", "rest", "1.0", "us", "25.0%"]


def test_both_modes_beside_each_other(profile_step, capsys):
    import invariance

    on = {"wall": 30.0, "busy": 20.0, "kinds": {"products": 15.0}, "times": {"a": 15.0, "same": 5.0}}
    off = {
        "wall": 25.0,
        "busy": 16.0,
        "kinds": {"products": 8.0, "rest": 3.0},
        "times": {"b": 11.0, "same": 5.0},
    }
    results = {"cost on": {}, "profile 1x8 on": on, "profile 64 on": on, "profile 1x8 off": off}
    invariance.compare_profiles({**results, "profile 64 off": {"error": "hung"}}, 2)
    title, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert title[:2] == ["profile", "1x8,"]
    assert lines == [
        ["wall", "30.0", "25.0", "5.0"], ["busy", "20.0", "16.0", "4.0"], ["products", "15.0", "8.0", "7.0"],
        ["rest", "0.0", "3.0", "-3.0"], ["a", "15.0", "0.0", "15.0"], ["b", "0.0", "11.0", "-11.0"],
    ]  # fmt: skip

"""Workloads: lengths, shared prefixes, seeds and files."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from fake_engine import FakeTokenizer

from jaxserve.bench.dataset import DatasetConfig, make_requests
from jaxserve.bench.traffic import Traffic
from jaxserve.cli.bench import find_tokenizer
from jaxserve.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer():
    return find_tokenizer("SmolLM2-135M-Instruct")


def test_random_prompts_have_exact_lengths_and_a_shared_prefix(tokenizer):
    config = DatasetConfig(num_prompts=30, input_len=40, output_len=10, range_ratio=0.5, prefix_len=25)
    requests = make_requests(config, tokenizer, chat=False)
    ids = [tokenizer.encode(request.prompt, add_special_tokens=False) for request in requests]
    assert [len(one) for one in ids] == [request.prompt_len for request in requests]
    lengths = [len(one) - 25 for one in ids]
    assert 20 <= min(lengths) < 30 < 50 < max(lengths) <= 60
    assert all(5 <= request.output_len <= 15 for request in requests)
    assert len({tuple(one[:25]) for one in ids}) == 1
    assert len({tuple(one[25:30]) for one in ids}) == 30
    assert requests == make_requests(config, tokenizer, chat=False)
    assert requests != make_requests(
        DatasetConfig(num_prompts=30, input_len=40, seed=1), tokenizer, chat=False
    )


def test_prefixes_are_shared_by_equal_parts(tokenizer):
    config = DatasetConfig("prefix_repetition", 12, shared_prefix_len=16, shared_suffix_len=8, num_prefixes=3)
    requests = make_requests(config, tokenizer, chat=True)
    ids = [tuple(tokenizer.encode(request.prompt, add_special_tokens=False)) for request in requests]
    prefixes = [one[:16] for one in ids]
    assert {prefixes.count(prefix) for prefix in prefixes} == {4}
    assert {len(one) for one in ids} == {24}
    assert len(set(ids)) == 12


def test_words_without_a_tokenizer():
    (request,) = make_requests(DatasetConfig(num_prompts=1, input_len=6), None, chat=True)
    assert len(request.prompt.split()) == request.prompt_len == 6


def test_sharegpt_takes_conversations_of_fitting_length(tmp_path):
    path = tmp_path / "sharegpt.json"
    conversations = [("a question", "an answer"), ("x", "too short a question"), ("y" * 2000, "too long"),
                     ("a question", "no")]  # fmt: skip
    entries = [{"conversations": [{"value": q}, {"value": a}]} for q, a in conversations]
    path.write_text(json.dumps([*entries, {"conversations": []}, {"id": 1}]))
    config = DatasetConfig("sharegpt", 3, path=str(path))
    requests = make_requests(config, FakeTokenizer(), chat=False)
    assert {(r.prompt, r.prompt_len, r.output_len) for r in requests} == {("a question", 11, 9)}
    assert len(requests) == 3  # repeated
    assert (
        len(
            make_requests(
                DatasetConfig("sharegpt", 3, path=str(path), oversample=False), FakeTokenizer(), chat=False
            )
        )
        == 1
    )
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        make_requests(config, None, chat=False)


def test_custom_lines(tmp_path):
    path = tmp_path / "custom.jsonl"
    path.write_text(
        '{"prompt": "hello", "output_tokens": 7}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    )
    config = DatasetConfig("custom", 2, path=str(path), custom_output_len=3, shuffle=False)
    prompt, messages = make_requests(config, FakeTokenizer(), chat=True)
    assert (prompt.prompt, prompt.output_len, messages.output_len) == ("hello", 7, 3)
    assert messages.messages == [{"role": "user", "content": "hi"}]
    path.write_text('{"prompt": "hello"}')
    (templated,) = make_requests(DatasetConfig("custom", 1, path=str(path)), FakeTokenizer(), chat=False)
    assert templated.prompt == "<user>hello\n<assistant>"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "holds no request"),
        ("{]", "line 1 is not JSON"),
        ('\n{"text": 1}', "line 2 must be an object with a 'prompt'"),
        ('{"prompt": "a", "output_tokens": 0}', "must be a positive number, got 0"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, words):
    path = tmp_path / "custom.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        make_requests(DatasetConfig("custom", 1, path=str(path)), FakeTokenizer(), chat=False)


def test_arrivals_have_the_mean_rate_and_the_burstiness_asked_for():
    def spread(burstiness: float) -> float:
        times = [0.0, *Traffic(10.0, burstiness).arrivals(1000, seed=0)]
        assert times[-1] == pytest.approx(100)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return (sum((gap - 0.1) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / 0.1

    assert spread(0.25) == pytest.approx(2, rel=0.15)
    assert spread(1) == pytest.approx(1, rel=0.1)
    assert spread(100) == pytest.approx(0.1, rel=0.1)
    assert Traffic().arrivals(3, seed=0) == [0.0] * 3
    ramp = Traffic(ramp_up="linear", ramp_up_start_rps=1, ramp_up_end_rps=9, burstiness=1e6).arrivals(
        100, seed=0
    )
    assert ramp[1] - ramp[0] == pytest.approx(1, rel=0.1)
    assert ramp[-1] - ramp[-2] == pytest.approx(1 / 9, rel=0.1)

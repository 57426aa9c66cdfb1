"""Requests in random situations against themselves alone, bit for bit: what ``invariance.py`` runs for its bits."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import parts  # which also makes what tests share importable
from disturbance import Disturbance

from jaxserve import LLM, SamplingParams
from jaxserve.bench.invariance import Bits, Target, bits_of

COMPANY = (0, 1, 1, 3, 3, 7, 7, 20, 20, 60, 200, 511)
"""Other requests of a situation, drawn evenly."""
BUDGETS = (64, 100, 256, 1000, 1 << 20)


@dataclass
class Differences:
    """What came of comparisons."""

    requests: int = 0
    different: int = 0
    other_tokens: int = 0
    values: int = 0
    other_values: int = 0
    examples: list[str] = field(default_factory=list)

    def compare(self, output: Any, expected: Bits, where: str) -> None:
        found = bits_of(output)
        self.requests += 1
        self.values += len(expected[1])
        if found == expected:
            return
        self.different += 1
        self.other_tokens += found[0] != expected[0]
        places = [i for i, (a, b) in enumerate(zip(found[1], expected[1], strict=False)) if a != b]
        self.other_values += len(places)
        first = places[0] if places else len(expected[1])
        prompt = len(output.prompt_logprobs or [])
        distances = [
            abs(float.fromhex(a[1]) - float.fromhex(b[1]))
            for a, b in zip(found[1][first], expected[1][first], strict=False)
        ]
        self.examples.append(
            f"prompt of {len(output.prompt_token_ids)}, first at {first} of {len(expected[1])} positions"
            f" ({prompt} of the prompt), by {max(distances, default=0):.2e}, {output.num_cached_tokens} cached: {where}"
        )

    def line(self) -> str:
        return (
            f"{self.requests} requests compared, {self.different} differ ({self.other_tokens} in their tokens); "
            f"{self.other_values} of {self.values} positions"
        )


def make_targets(rng: random.Random, vocab: int, longest: int, count: int) -> list[Target]:
    """Prompts of 1 to ``longest`` tokens; greedy, random and penalised; some score their prompts."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.2},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    targets: list[Target] = []
    for index in range(count):
        length = max(1, int(longest ** rng.random())) if index else longest
        prompt = [rng.randrange(8, vocab) for _ in range(length)]
        params = SamplingParams(
            max_tokens=rng.randint(2, 24), ignore_eos=True, seed=index, logprobs=3, detokenize=False,
            **kinds[index % len(kinds)],
        )  # fmt: skip
        targets.append(Target(prompt, params))
    return targets


def run(llm: LLM, requests: list[Target]) -> list[Any]:
    prompts: list[Any] = [{"prompt_token_ids": request.prompt} for request in requests]
    return llm.generate(prompts, [request.params for request in requests], use_tqdm=False)


def alone(llm: LLM, targets: list[Target]) -> list[tuple[Target, Bits]]:
    """Each by itself with nothing cached, and its prompt with most of its answer."""
    expected: list[tuple[Target, Bits]] = []
    for target in targets:
        llm.reset_prefix_cache()
        [output] = run(llm, [target])
        expected.append((target, bits_of(output)))
        if target.params.prompt_logprobs is None:
            llm.reset_prefix_cache()
            longer = Target(target.prompt + list(output.outputs[0].token_ids)[:-1], target.params)
            expected.append((longer, bits_of(run(llm, [longer])[0])))
    return expected


def keep(expected: list[tuple[Target, Bits]], path: Path) -> None:
    """Write requests and what they gave."""
    rows = [{"prompt": target.prompt, "seed": target.params.seed, "bits": bits} for target, bits in expected]
    path.write_text(json.dumps(rows))


def kept(path: Path, targets: list[Target]) -> list[tuple[Target, Bits]]:
    """What ``keep`` wrote of these targets, which have their places as seeds."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    rows = json.loads(path.read_text())
    return [(Target(row["prompt"], targets[row["seed"]].params), tuples(row["bits"])) for row in rows]


def try_restart(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """The requests of another process alone, in this one."""
    targets = make_targets(random.Random(options.seed), llm.info.vocab_size, options.longest, options.targets)
    found = Differences()
    for target, bits in kept(options.expected, targets):
        llm.reset_prefix_cache()
        found.compare(run(llm, [target])[0], bits, "restart")
    print(f"restart: {found.line()} ({parts.verdict(found.different, 0)})", flush=True)
    return {"requests": found.requests, "different": found.different, "other tokens": found.other_tokens}


def companions(
    rng: random.Random, expected: list[tuple[Target, Bits]], vocab: int, count: int
) -> list[Target]:
    """Requests that nobody compares: short and long, some with a target's beginning."""
    others: list[Target] = []
    longest = len(expected[0][0].prompt)
    for _ in range(count):
        length = min(longest, rng.choice([1, 5, 17, 40, 40, 130, 600 if count < 100 else 60]))
        prompt = [rng.randrange(8, vocab) for _ in range(length)]
        if rng.random() < 0.2:
            shared = rng.choice(expected)[0].prompt
            prompt = shared[: rng.randint(1, len(shared))] + prompt[:5]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]), max_tokens=rng.randint(1, 24), ignore_eos=True,
            seed=rng.randrange(1 << 30), logprobs=rng.choice([None, None, None, 1]), detokenize=False,
        )  # fmt: skip
        others.append(Target(prompt, params))
    return others


def try_situations(llm: LLM, options: argparse.Namespace, situations: int, *, mode: str) -> dict[str, Any]:
    """Targets in random situations against themselves alone."""
    rng, vocab = random.Random(options.seed), llm.info.vocab_size
    targets = make_targets(rng, vocab, options.longest, options.targets)
    started = time.perf_counter()
    expected = alone(llm, targets)
    if options.expected is not None and mode == "on":
        keep(expected, options.expected)
    print(
        f"mode {mode}: {len(expected)} requests alone after {time.perf_counter() - started:.0f} s", flush=True
    )
    disturbance, found = Disturbance(llm._core, rng, BUDGETS), Differences()
    cached = most = done = 0
    try:
        while done < situations and time.perf_counter() - started < options.seconds:
            size = min(rng.choice(COMPANY), options.most_company)
            chosen = [rng.choice(expected) for _ in range(rng.choice([1, 1, 2, 5]))]
            requests = [target for target, _ in chosen] + companions(rng, expected, vocab, size)
            order = rng.sample(range(len(requests)), len(requests))
            if cold := rng.random() < 0.4:
                llm.reset_prefix_cache()
            drawn = disturbance.next_situation(len(requests))
            where = f"situation {done}, {size} others, {drawn}{', cold' * cold}"
            outputs = run(llm, [requests[index] for index in order])
            most = max(most, len(requests))
            for place, index in enumerate(order):
                if index < len(chosen):
                    cached += outputs[place].num_cached_tokens
                    found.compare(outputs[place], chosen[index][1], where)
            done += 1
            if done % 25 == 0:
                print(f"  {done} situations, {found.line()}", flush=True)
    finally:
        disturbance.end()
        print(
            f"mode {mode}: {done} situations of up to {most} requests in {time.perf_counter() - started:.0f} s, "
            f"{disturbance.preemptions} preemptions, {cached} tokens of compared prompts from the cache\n"
            f"  {found.line()}"
        )
        for example in found.examples[: options.examples]:
            print(f"  {example}")
        sys.stdout.flush()
    if mode == "on":
        print(
            f"situations {done} {parts.verdict(done, situations, least=True)}; "
            f"requests that differ {found.different} {parts.verdict(found.different, 0)}",
            flush=True,
        )
    return {
        "situations": done, "most requests": most, "preemptions": disturbance.preemptions, "cached tokens": cached,
        "requests": found.requests, "different": found.different, "other tokens": found.other_tokens,
        "positions": found.values, "other positions": found.other_values,
    }  # fmt: skip

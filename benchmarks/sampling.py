"""Times the sampler alone: per program and mix of parameters, milliseconds a step, and seconds to compile it.

    python -m benchmarks.sampling --rows 1 8 32 64 --vocab 49152

Logits are random normal, twice as wide as a model's untrained ones: nuclei of top_p 0.95 hold thousands
of tokens.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.metadata import (
    ALL_FEATURES,
    NUM_COLUMNS,
    Feature,
    SamplingMetadata,
    make_table,
    step_features,
    write_row,
)
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import SamplerState, state_bytes
from jaxserve.sampling_params import SamplingParams

CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
    "top_k 400": SamplingParams(temperature=0.8, top_k=400),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k + top_p": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.5),
    "logit_bias": SamplingParams(temperature=0.0, logit_bias={3: 5.0}),
    "logprobs": SamplingParams(temperature=0.0, logprobs=20),
    "everything": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1, logit_bias={3: 5.0}, logprobs=20
    ),
}
PROGRAMS = {
    "greedy": Feature.NONE,
    "top_k": Feature.TOP_K,
    "random": Feature.RANDOM,
    "top_p": Feature.TOP_P,
    "all": ALL_FEATURES,
}


def _step(features, logits, packed, step_features, state):
    metadata = SamplingMetadata.from_packed(packed, step_features)
    return sample(logits, metadata, state, max_logprobs=20, features=features)


def _inputs(params: SamplingParams, num_rows: int) -> tuple[jax.Array, jax.Array]:
    table = make_table(num_rows)
    for row in range(num_rows):
        write_row(table, row, params, seed=row)
    packed = table[:num_rows]
    return jnp.asarray(packed), jnp.int32(int(step_features(packed)))


def measure(num_rows: int, vocab_size: int, program: str, steps: int) -> None:
    """Compile one program and print its time for every case that it serves."""
    features = PROGRAMS[program]
    state = SamplerState.create(num_rows, vocab_size)
    logits = 2 * jax.random.normal(jax.random.key(0), (num_rows, vocab_size), jnp.float32)
    start = time.perf_counter()
    compiled = (
        jax.jit(functools.partial(_step, features), donate_argnums=3)
        .lower(logits, jnp.zeros((num_rows, NUM_COLUMNS), jnp.int32), jnp.int32(0), state)
        .compile()
    )
    seconds = time.perf_counter() - start
    print(f"rows {num_rows}, vocabulary {vocab_size}, program {program}: compiled in {seconds:.2f} s")
    for name, params in CASES.items():
        packed, wanted = _inputs(params, num_rows)
        if Feature(int(wanted)) & ~features:
            continue
        times = []
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(steps):
                output, state = compiled(logits, packed, wanted, state)
            jax.block_until_ready((output, state))
            times.append((time.perf_counter() - start) / steps)
        dispatch = time.perf_counter()
        output, state = compiled(logits, packed, wanted, state)
        dispatch = time.perf_counter() - dispatch
        jax.block_until_ready(output)
        print(f"  {name:14s} {min(times) * 1e3:8.3f} ms (the call returns after {dispatch * 1e3:.3f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=10, help="Steps dispatched back to back.")
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    arguments = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    for num_rows in arguments.rows:
        size = state_bytes(num_rows, arguments.vocab) / 1e6
        print(f"state for {num_rows} rows: {size:.1f} MB")
        for program in arguments.programs:
            measure(num_rows, arguments.vocab, program, arguments.steps)


if __name__ == "__main__":
    np.set_printoptions(linewidth=120)
    main()

"""The KV cache that an engine allocates beside what ``jaxserve plan`` says of it, from the config alone.

    python benchmarks/cache_size.py --model llama-8b --topology h200-1      # 15 s with stored programs, 60 without

Weights are random. Exits with 1 if they are more than 3 % apart. ``offline.py --cache-plan h200-1`` compares them too,
of the engine that it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from parts import import_path

MODELS = Path(__file__).parent / "models"
APART = 0.03
"""Of the plan."""


def start_plan(folder: Path, topology: str, arguments: dict[str, Any]) -> subprocess.Popen[str]:
    """``jaxserve plan`` for an engine with these arguments of ``LLM``, in a process that needs no device."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    command = [
        sys.executable, "-m", "jaxserve.cli.main", "plan", str(folder), "--topology", topology, "--json",
        "--no-compile", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": import_path(), "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def compare(llm: Any, plan: subprocess.Popen[str]) -> tuple[int, int]:
    """Tokens that the engine's cache holds, and that its plan says.

    Raises:
        RuntimeError: there is no plan.
    """
    said, errors = plan.communicate(timeout=120)
    if not said:
        raise RuntimeError(f"jaxserve plan ended with {plan.returncode}: {errors[-1000:]}")
    info = llm.info
    return (info.num_blocks - 1) * info.block_size, json.loads(said)["cache_tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-8b", help="a folder of benchmarks/models, or a path")
    parser.add_argument("--topology", default="h200-1", help="what the plan is for: of this machine")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument(
        "--arguments",
        type=json.loads,
        default={},
        help="JSON of further arguments of LLM and flags of the plan",
    )
    options = parser.parse_args()
    folder = MODELS / options.model if (MODELS / options.model).is_dir() else Path(options.model)
    arguments = {"max_model_len": options.max_model_len, **options.arguments}
    plan = start_plan(folder, options.topology, arguments)
    from jaxserve import LLM

    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **arguments) as llm:
        allocated, planned = compare(llm, plan)
    apart = allocated / planned - 1
    met = abs(apart) <= APART
    print(
        f"{options.model} on {options.topology}: {allocated:,} tokens allocated, {planned:,} planned, "
        f"{100 * apart:+.2f} % (target {100 * APART:.0f} %): {'met' if met else 'MISSED'}",
        flush=True,
    )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())

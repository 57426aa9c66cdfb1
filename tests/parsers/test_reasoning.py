from __future__ import annotations

import pytest
from recorded_outputs import PARIS, TOOLS, Recorded, broken, check, json_call

from jaxserve.parsers import ParserNames, ParserSet, ReasoningDelta

THINKS_IN_PROMPT = "<|im_start|>assistant\n<think>\n"
THINKING_OFF = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
TABLE = {
    "deepseek_r1": [
        Recorded("Hm.\n</think>\n\nParis.", "Paris.", "Hm."),
        Recorded("<think>\nHm, <b> </thin>.\n</think>\n\nParis.\n", "Paris.\n", "Hm, <b> </thin>."),
        Recorded("Hm.</think>Paris.", "Paris.", "Hm.", prompt=THINKS_IN_PROMPT),
        Recorded("<think>Hm.</think>Paris.", "Paris.", "Hm.", prompt=THINKS_IN_PROMPT),
        Recorded("Still thinking </thi", "", "Still thinking </thi"),
        Recorded("Paris.", "Paris.", prompt=THINKING_OFF),
        Recorded("</think>Paris.", "Paris."),
        Recorded("<think></think>Paris. <think>", "Paris. <think>"),
    ],
    "qwen3": [
        Recorded("<think>\nHm.\n</think>\n\nParis.", "Paris.", "Hm."),
        broken("Paris.\n"),
        broken(" <thin"),
        Recorded("Hm.\n</think>\n\nParis.", "Paris.", "Hm.", prompt=THINKS_IN_PROMPT),
        Recorded("Paris.", "Paris.", prompt=THINKING_OFF),
        Recorded("<think>Hm.", "", "Hm."),
    ],
    "mistral": [
        Recorded("[THINK]Hm.[/THINK]Paris.", "Paris.", "Hm."),
        broken("[Paris]"),
    ],
    "granite": [
        Recorded("Here is my thought process:\nHm.\n\nHere is my response:\nParis.", "Paris.", "Hm."),
        Recorded(
            "Here's my thought process: Hm. Here is my thought. Here's my response: P.",
            "P.",
            "Hm. Here is my thought.",
        ),
        broken("Here is my answer."),
    ],
}


@pytest.mark.parametrize(
    ("name", "recorded"), [(name, recorded) for name, outputs in TABLE.items() for recorded in outputs]
)
def test_every_split(name: str, recorded: Recorded):
    check(ParserNames(reasoning=name), recorded)


def test_calls_within_the_reasoning_are_reasoning():
    call = f"<tool_call>\n{json_call(PARIS)}\n</tool_call>"
    recorded = Recorded(
        f"<think>\nMaybe {call}?\n</think>\n\nYes.\n{call}", "Yes.", f"Maybe {call}?", [PARIS]
    )
    check(ParserNames("hermes", "qwen3"), recorded)


def test_reasoning_is_streamed():
    parser = ParserSet(ParserNames(reasoning="deepseek_r1"), None).create()
    assert parser.feed("One ") == [ReasoningDelta("One")]
    assert parser.feed("two") == [ReasoningDelta(" two")]


@pytest.mark.parametrize("pieces", [[[5, 6, 7, 9, 1, 2]], [[5], [6, 7], [9, 1], [2]]])
def test_reasoning_tokens_are_those_before_the_end(pieces: list[list[int]]):
    class Tokenizer:
        special_token_ids = frozenset({9})

        def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
            return ["</think>" if token_id == 9 else "?" for token_id in token_ids]

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [9] if text == "</think>" else [1, 2]

    parser = ParserSet(ParserNames(reasoning="deepseek_r1"), Tokenizer()).create(tools=TOOLS)
    assert parser.num_reasoning_tokens == 0
    for token_ids in pieces:
        parser.feed("".join("</think>" if token == 9 else "x" for token in token_ids), token_ids)
    assert parser.num_reasoning_tokens == 3


def test_no_reasoning_counts_no_tokens():
    parser = ParserSet(ParserNames(reasoning="qwen3"), None).create()
    parser.feed("Paris.", [1, 2])
    parser.finish()
    assert parser.num_reasoning_tokens == 0

"""Tool-call and reasoning parsers: what a model wrote becomes content, reasoning and calls, while it writes.

One contract (``interface.py``), one syntax a file (``tools/``, ``reasoning/``), one code path: a whole output's
parse is the sum of the deltas. An endpoint sees ``OutputParser`` alone::

    parser = parser_set.create(prompt, tools=...)        # one per choice
    deltas = parser.feed(choice.text, choice.token_ids)  # as they come, in pieces of any size
    deltas += parser.finish()                            # once, at the end

To add a syntax: one file with a class, one line in ``registry.py``, one test with recorded outputs.
"""

from jaxserve.parsers.interface import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)
from jaxserve.parsers.output_parser import OutputParser, ParsedCall, ParsedOutput, parse_output
from jaxserve.parsers.registry import ParserNames, ParserSet, choose

__all__ = [
    "ContentDelta",
    "OutputDelta",
    "OutputParser",
    "ParsedCall",
    "ParsedOutput",
    "ParserNames",
    "ParserSet",
    "ReasoningDelta",
    "ToolCallDelta",
    "ToolCallStart",
    "choose",
    "parse_output",
]

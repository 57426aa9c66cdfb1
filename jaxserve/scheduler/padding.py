"""Padding: how a step with prompts is kept from being mostly padding.

From a few hundred tokens on a step takes as long as its padded size says. So where its tokens are little more than
the size below, the last chunk of a prompt is cut there, and its rest is computed by the next step, among whatever that
has to do: a prompt of 1,100 tokens takes a step of 1,024 and 76 tokens of another, instead of one of 1,536.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from jaxserve.scheduler.step_plan import StepPlan


class StepSizes:
    """The sizes that steps with prompts are padded to, where padding costs what tokens do.

    Args:
        sizes: ascending.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)

    def excess(self, num_tokens: int) -> int:
        """How many tokens to put off so that a step of ``num_tokens`` takes the next smaller size; 0 if none.

        At most two thirds of the way to the next larger one: the next step computes what is put off, and takes longer
        for it, though less than a step of its own would.
        """
        index = bisect_left(self._sizes, num_tokens)
        if not 0 < index < len(self._sizes):
            return 0
        below, above = self._sizes[index - 1 : index + 1]
        excess = num_tokens - below
        return excess if 3 * excess <= 2 * (above - below) else 0

    def trim(self, step: StepPlan) -> None:
        """Put the excess of a step off, that of the prompts that came last, first.

        Not if less of its prompts would stay than is put off: where decoding rows fill a size, a prompt would go on by
        a token a step.
        """
        num_tokens = step.count_tokens()
        excess = self.excess(num_tokens) if step.other_rows else 0
        if not 0 < excess <= num_tokens - excess - len(step.decode_rows):
            return
        cuts: list[tuple[int, int]] = []
        for index in reversed(range(len(step.other_rows))):
            request, num_tokens, _ = step.other_rows[index]
            if request.grammar is not None and request.num_computed_tokens > request.num_prompt_tokens:
                continue  # its appended tokens came to fill padding
            cuts.append((index, min(excess, num_tokens - 1)))  # every row of a step has a token
            excess -= cuts[-1][1]
            if excess == 0:
                for cut in cuts:
                    step.cut(*cut)
                return

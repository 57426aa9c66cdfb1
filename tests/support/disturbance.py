"""Disturbance: preempts, aborts, and changes the budget and the depth of an engine's steps, at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

PREEMPTED = 0.15
"""Of the steps of a situation with preemptions, those before which a request loses its blocks."""
ABORTED = 0.1
"""Of all steps, those before which a request is aborted, while there are any to be."""


class Disturbance:
    """Stands in for a core's ``step``, as a situation has it.

    Args:
        core: an ``EngineCore``.
        rng: of all that is random here.
        budgets: tokens of a step, at most; one is drawn for each situation.
        abort: ends a request. Called with the ids in ``abortable``, which it leaves then.

    Attributes:
        preemptions, aborts: how many there were.
    """

    def __init__(
        self,
        core: Any,
        rng: random.Random,
        budgets: Sequence[int],
        abort: Callable[[str], None] | None = None,
    ) -> None:
        self._step, self._core, self._rng, self._depth = core.step, core, rng, core._depth
        self._budgets, self._abort = budgets, abort
        self._most = core.scheduler._planner.max_num_batched_tokens
        self.abortable: list[str] = []
        self.preempts = False
        self.preemptions = self.aborts = 0
        core.step = self.step

    def step(self) -> Any:
        if self.abortable and self._rng.random() < ABORTED:
            self.abort(self._rng.randrange(len(self.abortable)))
        scheduler = self._core.scheduler
        rank = scheduler._lifecycle.ranks[0]
        if self.preempts and len(rank.running) > 1 and self._rng.random() < PREEMPTED:
            rank.running.append(rank.running.pop(self._rng.randrange(len(rank.running))))
            scheduler._lifecycle.preempt_last(rank)
            self.preemptions += 1
        return self._step()

    def abort(self, index: int = 0) -> None:
        """End one of the abortable requests."""
        assert self._abort is not None
        self._abort(self.abortable.pop(index))
        self.aborts += 1

    def end(self) -> None:
        """Leave the core as it was."""
        self._core.step, self._core._depth = self._step, self._depth
        self._core.scheduler._planner.max_num_batched_tokens = self._most

    def next_situation(self, num_requests: int) -> str:
        """Draw what happens to it."""
        # Each running request has a token of the budget.
        budget = min(max(self._rng.choice(self._budgets), num_requests + 8), self._most)
        self._core.scheduler._planner.max_num_batched_tokens = budget
        self._core._depth = self._rng.choice([1, 2, 2])
        self.preempts = self._rng.random() < 0.5
        return f"{budget} tokens a step, depth {self._core._depth}{', preempting' * self.preempts}"

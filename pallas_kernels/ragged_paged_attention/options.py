"""AttentionOptions: what is fixed for one layer's attention, hence static in the compiled step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one layer.

    Args:
        scale: multiplies q . k.
        sliding_window: tokens a query sees, itself included; None sees all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; None leaves them.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

"""The scheduler: who runs in the next step, within one token budget."""

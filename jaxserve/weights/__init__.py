"""Finding and reading checkpoints."""

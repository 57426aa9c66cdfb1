"""Finding a checkpoint, reading its tensors, and loading them as sharded arrays. ``resolve`` needs no JAX."""

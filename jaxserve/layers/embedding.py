"""Token embedding and logits, split over the vocabulary."""

from __future__ import annotations

import math

import jax
from flax import nnx

from jaxserve.layers.linear import contract
from jaxserve.layers.params import LayerContext


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows stored: the vocabulary rounded up, so that every device holds the same number."""
    return math.ceil(vocab_size / tensor_parallel_size) * tensor_parallel_size


class LMHead(nnx.Module):
    """[V, M] weights of the logits."""

    def __init__(self, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        rows = padded_vocab_size(vocab_size, context.tensor_parallel_size)
        self.weight = context.param((rows, hidden_size), ("vocab", "embed"))
        self.vocab_size = vocab_size
        self.context = context

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, V] float32 scores of ``hidden`` [R, M]; under tensor parallelism this device's columns."""
        scores = contract(
            hidden, self.weight[...], weight_first=self.context.weight_first, kernel=self.context.dense_matmul
        )
        return scores[:, : self.vocab_size] if self.context.tensor_parallel_size == 1 else scores


class Embedding(LMHead):
    """[V, M] token vectors, and the logits over them where the model ties the two."""

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Vectors of ``token_ids`` [T] int32, which must lie in the vocabulary: [T, M], or this device's tokens of it
        where tokens are shared."""
        if self.context.tensor_parallel_size == 1:
            return self.weight.at[token_ids].get(mode="clip")
        # Each device knows the vectors of its rows and contributes zeros for the others.
        weight = self.weight[...]
        rows_here = token_ids - self.context.shard_index() * weight.shape[0]
        vectors = weight.at[rows_here].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return self.context.reduce_tokens(vectors, meet=True)

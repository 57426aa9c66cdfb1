"""The paged KV cache's bookkeeping: blocks, hashes, prefix cache."""

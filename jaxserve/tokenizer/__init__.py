"""Tokenizers: loading, chat templates, incremental detokenization. No JAX here."""

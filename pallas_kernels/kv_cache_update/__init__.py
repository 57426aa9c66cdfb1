"""Kv cache update: the oracle and one implementation per backend."""

"""Ragged paged attention: the oracle and one implementation per backend."""

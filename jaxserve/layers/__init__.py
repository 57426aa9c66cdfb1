"""Layers shared by the model families.

Shape letters, used everywhere: T tokens of a step, R rows (requests) of a step, H query heads, K key/value
heads, G = H / K query heads a group, D head size, M hidden size, F feed-forward size, V vocabulary, B
blocks of a block table, L layers, E experts.
"""

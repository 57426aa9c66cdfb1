"""Grouped matmul: sorted rows, each group of them by a matrix of its own. ``dispatch.grouped_matmul`` chooses how."""

"""Dense products with weights: rows by one [N, K] matrix. ``dispatch.dense_matmul_of`` chooses how."""

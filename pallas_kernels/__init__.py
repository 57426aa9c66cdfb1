"""Attention and cache kernels for TPU, GPU and CPU. Imports only JAX and itself."""

"""What all Mosaic GPU kernels share: launching, and small pieces. JAX's own package of that name is another one."""

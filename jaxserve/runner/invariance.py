"""What a runner does differently, and what it refuses, so that a token's bits depend on its request alone.

What could make them depend on the rest of the step, on a GPU:

* Products: XLA times algorithms for each number of rows and takes the fastest, split-K among them. A kernel with one
  order for all numbers of rows multiplies instead (``pallas_kernels.dense_matmul``). Its table says for which numbers
  of rows of which weight XLA does, whose choice is pinned (``PINNED_PRODUCTS``) and then has the same bits. Weights
  that it does not take are pinned XLA's for all numbers of rows. No step has fewer than 8, since for one row even
  pinned products are another algorithm.
* Norms: their sums are a kernel's of ours (``fixed_norm``).
* Attention: the decode kernel and the prefill kernel are each invariant and differ from each other, so the scheduler
  keeps a token to one of them (``RunnerInfo.separate_paths``).
* What is left is elementwise, or sums of integers (sampling, log probabilities).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.models import Model
from pallas_kernels.dense_matmul.dispatch import DenseMatmul
from pallas_kernels.dispatch import AttentionBackend, BlockedBackend
from pallas_kernels.mla_attention.dispatch import LatentBackend
from pallas_kernels.rms_norm.dispatch import PLAIN, OnesNorm, RMSNorm, fixed_norm

CompilerOptions = tuple[tuple[str, bool | int | str], ...]
PINNED_PRODUCTS: CompilerOptions = (("xla_gpu_autotune_level", 0), ("xla_gpu_enable_triton_gemm", False))
"""cuBLAS' first choice, untimed: alone the same bits for all numbers of rows from 2 to 16,384 that were tried on an
H200, in an engine, it seems, all but 192."""
FEWEST_ROWS = 8
"""Of a step on a GPU: padding beyond it costs nothing there."""


@dataclass(frozen=True)
class Invariance:
    """The choices. One place says what is fixed and how, so that one line exchanges it.

    Args:
        enabled: ``--batch-invariant``.
        platform: ``cpu``, ``gpu`` or ``tpu``.
        norm_kernel: norms of a GPU are a kernel's, not XLA's additions one by one.
        product_kernel: a GPU's dense products are a kernel's where its table says so, not all XLA's pinned ones.
    """

    enabled: bool
    platform: str
    norm_kernel: bool = True
    product_kernel: bool = True

    def rms_norm(self, backend: AttentionBackend) -> RMSNorm:
        """The norm of a model on ``backend``."""
        if not self.enabled:
            return PLAIN
        if isinstance(backend, BlockedBackend):
            return OnesNorm()
        return fixed_norm(self.platform, getattr(backend, "num_sms", None), kernel=self.norm_kernel)

    def dense_matmul(self, kernel: DenseMatmul | None) -> DenseMatmul | None:
        """What computes dense products, given what would if speed alone decided."""
        if not self.enabled or kernel is None:
            return kernel
        return kernel.for_all_rows() if self.product_kernel else None

    @property
    def compiler_options(self) -> CompilerOptions:
        """Of every program."""
        return PINNED_PRODUCTS if self.enabled and self.platform == "gpu" else ()

    @property
    def fewest_rows(self) -> int:
        """Tokens, and rows where a step only decodes, of the smallest step; 1: no matter."""
        if not self.enabled:
            return 1
        return FEWEST_ROWS if self.platform == "gpu" else 2

    def separate_paths(self, backend: AttentionBackend | LatentBackend) -> bool:
        """``RunnerInfo.separate_paths``."""
        return self.enabled and getattr(backend, "separate_paths", True)

    def why_not(self, model: Model, backend: Any, why_no_kernels: str | None, num_devices: int) -> str | None:
        """Why it can't be had; None if it can.

        Args:
            model: what is served.
            backend: its attention.
            why_no_kernels: why that is not the device's own.
            num_devices: that a step runs on.
        """
        kind = "latent attention" if model.has_latents else "experts" if model.has_experts else None
        if kind is not None:
            return f"batch_invariant is implemented for dense models, and this one has {kind}; leave it out."
        if self.platform == "tpu":
            return "batch_invariant is implemented on CPUs and Hopper GPUs, not on this TPU; leave it out."
        if self.platform == "cpu":
            return None
        if isinstance(backend, BlockedBackend):
            return f"batch_invariant on GPUs needs the Hopper kernels: {why_no_kernels}"
        if num_devices > 1:
            return (
                f"batch_invariant on GPUs is implemented for one device, not for {num_devices}: the order in which "
                "they add up their results is not fixed. Leave it, or tensor_parallel_size, out."
            )
        return None

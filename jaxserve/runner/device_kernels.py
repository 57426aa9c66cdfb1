"""DeviceKernels: what this process's devices offer a model, one question a method."""

from __future__ import annotations

import logging
from collections.abc import Collection

from jax.sharding import Mesh

from jaxserve.layers.params import TENSOR_AXIS
from pallas_kernels.all_reduce.dispatch import AllReduce, all_reduce_of
from pallas_kernels.all_reduce.workspace import Workspaces, workspaces_or_why
from pallas_kernels.dense_matmul.dispatch import DenseMatmul, dense_matmul_of
from pallas_kernels.dispatch import AttentionBackend, AttentionSizes, attention_backend
from pallas_kernels.grouped_matmul.dispatch import GroupedMatmul, grouped_matmul_of
from pallas_kernels.mla_attention.dispatch import LatentBackend, latent_backend
from pallas_kernels.ragged_paged_attention.options import AttentionOptions
from pallas_kernels.rms_norm.dispatch import AddNorm, add_norm_of
from pallas_kernels.split_heads.dispatch import SplitHeads, split_heads_of

logger = logging.getLogger(__name__)


class DeviceKernels:
    """The best implementations that one kind of device has.

    Args:
        platform: ``cpu``, ``gpu`` or ``tpu``.

    Attributes:
        workspaces: the memory through which tensor-parallel devices add up, once ``peer_all_reduce`` made it.
    """

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.workspaces: Workspaces | None = None

    def attention(
        self, sizes: AttentionSizes, layer_options: Collection[AttentionOptions]
    ) -> tuple[AttentionBackend, str | None]:
        """Attention over keys and values, and why it is not the device's own (None: it is)."""
        return attention_backend(self.platform, sizes, layer_options)

    def latent_attention(self) -> tuple[LatentBackend, str | None]:
        """Attention over latents, likewise."""
        return latent_backend(self.platform)

    def grouped_matmul(self) -> tuple[GroupedMatmul, str | None]:
        """The products of experts, likewise."""
        return grouped_matmul_of(self.platform)

    def dense_matmul(self) -> DenseMatmul | None:
        """The other products; None where XLA computes them."""
        return dense_matmul_of(self.platform)[0]

    def split_heads(self) -> SplitHeads | None:
        """What comes between the product of queries, keys and values and attention; None where XLA does it."""
        return split_heads_of(self.platform)

    def add_norm(self) -> AddNorm | None:
        """A residual's sum and its norm; None where XLA does it."""
        return add_norm_of(self.platform)

    def peer_all_reduce(self, mesh: Mesh | None) -> AllReduce | None:
        """The all-reduce of few tokens over tensor-parallel devices; None where all are NCCL's or XLA's.

        The memory through which they add up is made at once, since only then it is known that they can reach it.

        Args:
            mesh: None for one device.
        """
        if self.platform != "gpu" or mesh is None or mesh.shape[TENSOR_AXIS] == 1:
            return None
        groups = mesh.devices.tolist()
        kernel, why_not = all_reduce_of(groups)
        if kernel is not None:
            self.workspaces, why_not = workspaces_or_why(groups, kernel.capacity)
        if why_not is not None:
            logger.warning("All-reduces of few tokens take NCCL, which is slower: %s", why_not)
        return kernel if why_not is None else None

    def close(self) -> None:
        """Free the memory. No program may run that was given its addresses."""
        if self.workspaces is not None:
            self.workspaces.close()
            self.workspaces = None

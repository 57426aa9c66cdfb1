"""PlannedKernels: what devices that are not there would offer a model, by what is known of their kind."""

from __future__ import annotations

from collections.abc import Collection

from jax.sharding import Mesh

from jaxserve.layers.params import TENSOR_AXIS
from jaxserve.plan.hardware import Topology
from jaxserve.runner.device_kernels import DeviceKernels
from pallas_kernels.all_reduce.dispatch import AllReduce, hopper_all_reduce
from pallas_kernels.dense_matmul.dispatch import DenseMatmul
from pallas_kernels.dispatch import AttentionBackend, AttentionSizes, BlockedBackend
from pallas_kernels.grouped_matmul.dispatch import PORTABLE, GroupedMatmul, WhereItCan
from pallas_kernels.ragged_paged_attention.options import AttentionOptions


class PlannedKernels(DeviceKernels):
    """Args:
    topology: the devices.
    portable: take what every device can, to trace programs.
    """

    def __init__(self, topology: Topology, *, portable: bool) -> None:
        super().__init__(topology.platform)
        self._topology, self._portable = topology, portable

    def attention(
        self, sizes: AttentionSizes, layer_options: Collection[AttentionOptions]
    ) -> tuple[AttentionBackend, str | None]:
        if self._portable:
            return BlockedBackend(), None
        group = sizes.num_heads // sizes.num_kv_heads
        if self.platform == "tpu":
            from pallas_kernels.ragged_paged_attention import tpu as kernels

            backend: AttentionBackend = kernels.TpuAttentionBackend(self._topology.generation)
        else:
            from pallas_kernels.ragged_paged_attention import gpu as kernels

            backend = kernels.GpuBackend()
        reasons = [
            kernels.supported(sizes.head_size, group, sizes.block_size, sizes.dtype, options, sizes.kv_dtype)
            for options in layer_options
        ]
        why_not = next(filter(None, reasons), None)
        return (backend if why_not is None else BlockedBackend()), why_not

    def grouped_matmul(self) -> tuple[GroupedMatmul, str | None]:
        if self._portable:
            return PORTABLE, None
        if self.platform == "tpu":
            from pallas_kernels.grouped_matmul.tpu import TpuGroupedMatmul

            return WhereItCan(TpuGroupedMatmul(self._topology.generation)), None
        from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

        return WhereItCan(GpuGroupedMatmul()), None

    def dense_matmul(self) -> DenseMatmul | None:
        if self._portable or self.platform != "gpu":
            return None
        from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

        return GpuDenseMatmul()

    def peer_all_reduce(self, mesh: Mesh | None) -> AllReduce | None:
        """No memory is made for it."""
        if self._portable or self.platform != "gpu" or mesh is None or mesh.shape[TENSOR_AXIS] == 1:
            return None
        return hopper_all_reduce(mesh.shape[TENSOR_AXIS])[0]

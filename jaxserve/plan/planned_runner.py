"""PlannedRunner: the engine's runner up to the point where it would touch a device, for devices that are not there.

Model, buckets, cache size and programs come from the runner's own code. Only what a device would answer is replaced:
which devices there are, what attention they offer, and how much memory is in use once the weights are loaded.
"""

from __future__ import annotations

from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxserve.config import EngineConfig
from jaxserve.models import Model
from jaxserve.plan.hardware import Topology
from jaxserve.plan.planned_store import PlannedStore
from jaxserve.runner.compilation import program_folder
from jaxserve.runner.kv_arrays import MemoryBudget
from jaxserve.runner.model_runner import JaxModelRunner
from jaxserve.runner.placement import Placement
from jaxserve.runner.program_store import ProgramStore
from jaxserve.runner.programs import StepPrograms
from jaxserve.runner.temporaries import device_shape
from jaxserve.runner.weight_traffic import weight_bytes
from pallas_kernels.all_reduce.dispatch import AllReduce, hopper_all_reduce
from pallas_kernels.dense_matmul.dispatch import DenseMatmul
from pallas_kernels.dispatch import AttentionBackend, AttentionSizes, BlockedBackend
from pallas_kernels.grouped_matmul.dispatch import PORTABLE, GroupedMatmul, WhereItCan
from sharding import MESH_AXES, ParamSpec, make_mesh


class PlannedRunner(JaxModelRunner):
    """Args:
    config: with the defaults of the topology's platform.
    topology: where it would run.
    hf_config: config.json of the model.
    compiles: devices are asked of the compiler, so that ``programs_for`` can be compiled; else only sizes are known.
    portable: take the attention that every device can, to trace programs.
    """

    def __init__(
        self,
        config: EngineConfig,
        topology: Topology,
        hf_config: dict[str, Any],
        *,
        compiles: bool,
        portable: bool = False,
    ) -> None:
        super().__init__(config)
        self.platform = topology.platform
        self.topology, self.compiles, self.portable = topology, compiles, portable
        self.placement = self._place()
        self._program_folder = (
            program_folder(config.compilation_config.compile_cache_dir) if compiles else None
        )
        self._choose_model({**hf_config, **config.model_config.hf_overrides})
        self._make_builder()

    def _available_devices(self) -> list[Any]:
        if self.compiles:
            return self.topology.devices()
        return [None] * self.topology.num_devices

    def _make_placement(self, devices: list[Any]) -> Placement:
        parallel = self.config.parallel_config
        tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
        if self.compiles:
            return Placement(make_mesh(tensor, devices, data_parallel_size=data))
        mesh = AbstractMesh((data, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        return Placement(mesh)  # type: ignore[arg-type]  # only sizes are asked of it

    def _attention_backend(self, sizes: AttentionSizes, model: Model) -> tuple[AttentionBackend, str | None]:
        if self.portable:
            return BlockedBackend(), None
        group = sizes.num_heads // sizes.num_kv_heads
        if self.platform == "tpu":
            from pallas_kernels.ragged_paged_attention import tpu as kernels

            backend: AttentionBackend = kernels.TpuAttentionBackend(self.topology.generation)
        else:
            from pallas_kernels.ragged_paged_attention import gpu as kernels

            backend = kernels.GpuBackend()
        reasons = [
            kernels.supported(sizes.head_size, group, sizes.block_size, sizes.dtype, options, sizes.kv_dtype)
            for options in model.attention_options
        ]
        self.why_no_kernels = next(filter(None, reasons), None)
        return (backend if self.why_no_kernels is None else BlockedBackend()), self.why_no_kernels

    def _grouped_matmul(self) -> tuple[GroupedMatmul, str | None]:
        if self.portable:
            return PORTABLE, None
        if self.platform == "tpu":
            from pallas_kernels.grouped_matmul.tpu import TpuGroupedMatmul

            return WhereItCan(TpuGroupedMatmul(self.topology.generation)), None
        from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

        return WhereItCan(GpuGroupedMatmul()), None

    def _dense_matmul(self) -> DenseMatmul | None:
        if self.portable or self.platform != "gpu":
            return None
        from pallas_kernels.dense_matmul.gpu import GpuDenseMatmul

        return GpuDenseMatmul()

    def _peer_all_reduce(self) -> AllReduce | None:
        devices = self.config.parallel_config.tensor_parallel_size
        if self.portable or self.platform != "gpu" or devices == 1:
            return None
        return hopper_all_reduce(devices)[0]

    def _device_budget(self, temporaries: int) -> MemoryBudget:
        share = self.config.cache_config.gpu_memory_utilization
        return MemoryBudget(int(self.topology.hbm_bytes * share), self.weight_bytes(), temporaries)

    def _program_store(self) -> ProgramStore:
        folder = None if self.why_not_stored() else self._program_folder
        devices = self.placement.devices if self.compiles else []
        return PlannedStore(folder, self._program_description(), devices, self.topology.num_devices)

    def why_not_stored(self) -> str | None:
        """Why compiled programs are no use to an engine on the real devices; None if they are kept for it."""
        if not self.compiles:
            return "nothing is compiled"
        if self.config.parallel_config.num_devices == 1:
            return "on one device an engine's programs know no mesh, and these do"
        if len({device.process_index for device in self.placement.devices}) > 1:
            return "the slice has several hosts, whose order of devices is not known beforehand"
        if self._program_folder is None:
            return "there is no folder for them"
        return None

    def weight_bytes(self) -> int:
        """Bytes of all parameters on one device."""
        return weight_bytes(self.model, self.mesh)

    def device_shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """A parameter's shape on one device."""
        return device_shape(self.model, spec, self.mesh)

    @property
    def hf_config(self) -> dict[str, Any]:
        """config.json with the user's overrides."""
        return self._hf_config

    @property
    def num_layers(self) -> int:
        """Layers that attend."""
        return len(self.specs)

    def budget_bytes(self) -> int:
        """What weights, state, programs and cache of one device may take together."""
        return self._device_budget(0).total

    def max_model_len_asked(self) -> int:
        """The longest request: what was asked for, or what fits the cache (auto), or the model's own."""
        asked = self.config.model_config.max_model_len
        if isinstance(asked, int):
            return asked
        return getattr(self, "max_model_len", self.model.max_position_embeddings)

    @property
    def mesh(self) -> Mesh:
        """Of devices that are not there."""
        assert self.placement.mesh is not None
        return self.placement.mesh

    def num_blocks_for(self, temporaries: int) -> int:
        """Blocks of the cache of a rank, the dummy included; ``max_model_len`` is settled with it.

        Raises:
            OutOfMemoryError: the longest request does not fit.
        """
        return self._num_blocks(temporaries)

    def programs_for(self, num_blocks: int) -> StepPrograms:
        """The engine's programs for a cache of so many blocks."""
        return self._programs(num_blocks)

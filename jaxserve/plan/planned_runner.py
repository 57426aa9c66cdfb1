"""PlannedRunner: the engine's runner up to the point where it would touch a device, for devices that are not there.

Model, buckets, cache size and programs come from the runner's own parts. Only what a device would answer is replaced:
which devices there are, what kernels they offer, and how much memory is in use once the weights are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxserve.config import EngineConfig
from jaxserve.kv_cache_spec import KVCacheSpec
from jaxserve.models import Model
from jaxserve.plan.hardware import Topology
from jaxserve.plan.planned_kernels import PlannedKernels
from jaxserve.plan.planned_store import PlannedStore
from jaxserve.runner.batch_builder import BatchBuilder
from jaxserve.runner.cache_sizer import CacheSizer
from jaxserve.runner.compilation import program_folder
from jaxserve.runner.devices import check_enough
from jaxserve.runner.engine_programs import EnginePrograms
from jaxserve.runner.invariance import Invariance
from jaxserve.runner.kv_arrays import MemoryBudget
from jaxserve.runner.placement import Placement
from jaxserve.runner.programs import StepPrograms
from jaxserve.runner.served_model import ModelBuilder
from jaxserve.runner.temporaries import device_shape
from jaxserve.runner.weight_traffic import weight_bytes
from sharding import MESH_AXES, ParamSpec, make_mesh


class PlannedRunner:
    """What the runner of an engine would be made of.

    Args:
        config: with the defaults of the topology's platform.
        topology: where it would run.
        hf_config: config.json of the model.
        compiles: the compiler is asked for devices, and ``programs_for`` can be compiled; else only sizes are known.
        portable: take the kernels that every device can, to trace programs.

    Attributes:
        served: the model on its kernels, and the types that it computes in.
        max_model_len: tokens of the longest request: what was asked for, or what fits the cache that was sized last
            (auto), or the model's own.
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
        self.config, self.topology, self.compiles = config, topology, compiles
        self.placement = self._place()
        self._folder = program_folder(config.compilation_config.compile_cache_dir) if compiles else None
        invariance = Invariance(config.compilation_config.batch_invariant, topology.platform)
        kernels = PlannedKernels(topology, portable=portable)
        self.served = ModelBuilder(config, self.placement, kernels, invariance).build(
            {**hf_config, **config.model_config.hf_overrides}
        )
        self._programs = EnginePrograms(config, self.served, self.placement, invariance, self._open_store)
        self._sizer = CacheSizer(config, self._programs, self._device_budget)
        asked = config.model_config.max_model_len
        self.max_model_len = asked if isinstance(asked, int) else self.model.max_position_embeddings

    def _place(self) -> Placement:
        parallel = self.config.parallel_config
        tensor, data = parallel.tensor_parallel_size, parallel.data_parallel_size
        if self.compiles:
            devices = self.topology.devices()
            check_enough(parallel, len(devices))
            return Placement(make_mesh(tensor, devices, data_parallel_size=data))
        check_enough(parallel, self.topology.num_devices)
        mesh = AbstractMesh((data, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        return Placement(mesh)  # type: ignore[arg-type]  # only sizes are asked of it

    def _device_budget(self, temporaries: int) -> MemoryBudget:
        return MemoryBudget(self.budget_bytes(), self.weight_bytes(), temporaries)

    def _open_store(self, description: str) -> PlannedStore:
        folder: Path | None = None if self.why_not_stored() else self._folder
        devices = self.placement.devices if self.compiles else []
        return PlannedStore(folder, description, devices, self.topology.num_devices)

    def why_not_stored(self) -> str | None:
        """Why compiled programs are no use to an engine on the real devices; None if they are kept for it."""
        if not self.compiles:
            return "nothing is compiled"
        if self.config.parallel_config.num_devices == 1:
            return "on one device an engine's programs know no mesh, and these do"
        if len({device.process_index for device in self.placement.devices}) > 1:
            return "the slice has several hosts, whose order of devices is not known beforehand"
        if self._folder is None:
            return "there is no folder for them"
        return None

    @property
    def model(self) -> Model:
        """What is served."""
        return self.served.model

    @property
    def specs(self) -> list[KVCacheSpec]:
        """What each layer that attends keeps, as one device has it."""
        return self.served.specs

    @property
    def builder(self) -> BatchBuilder:
        """The bucket table, and what packs batches for it."""
        return self._programs.builder

    @property
    def mesh(self) -> Mesh:
        """Of devices that are not there."""
        assert self.placement.mesh is not None
        return self.placement.mesh

    @property
    def num_layers(self) -> int:
        """Layers that attend."""
        return len(self.specs)

    def weight_bytes(self) -> int:
        """Bytes of all parameters on one device."""
        return weight_bytes(self.model, self.mesh)

    def device_shape(self, spec: ParamSpec) -> tuple[int, ...]:
        """A parameter's shape on one device."""
        return device_shape(self.model, spec, self.mesh)

    def budget_bytes(self) -> int:
        """What weights, state, programs and cache of one device may take together."""
        return int(self.topology.hbm_bytes * self.config.cache_config.gpu_memory_utilization)

    def estimated_temporaries(self) -> int | None:
        """Bytes by which the engine sizes its cache before programs are compiled; None where it measures them."""
        return self._sizer.estimated_temporaries()

    def num_blocks_for(self, temporaries: int) -> int:
        """Blocks of the cache of a rank, the dummy included; ``max_model_len`` is settled with it.

        Raises:
            OutOfMemoryError: the longest request does not fit.
        """
        size = self._sizer.fit(temporaries)
        self.max_model_len = size.max_model_len
        return size.num_blocks

    def programs_for(self, num_blocks: int) -> StepPrograms:
        """The engine's programs for a cache of so many blocks."""
        return self._programs.for_cache(num_blocks, self.max_model_len)

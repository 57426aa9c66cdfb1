"""RayServeConfig: how many replicas there are, what each one gets, and how requests are spread over them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config.fields import check_at_least, check_choices, setting
from jaxserve.errors import ConfigError


@dataclass(frozen=True)
class RayServeConfig:
    """Replicas of the engine on a Ray cluster."""

    replicas: int = setting(1, "Engines that serve the model; with --max-replicas the fewest.")
    max_replicas: int | None = setting(
        None, "Let Ray Serve add engines up to this number while they are busy. Default: none."
    )
    requests_per_replica: int = setting(
        64, "With --max-replicas: running requests an engine at which another one is added."
    )
    accelerator: str = setting(
        "auto",
        "What a replica's devices are to Ray: as many GPUs or TPU chips as the engine's mesh has devices, or none "
        "(cpu). auto takes what the cluster has.",
        choices=("auto", "cpu", "gpu", "tpu"),
    )
    cpus_per_replica: float = setting(1.0, "CPUs that Ray reserves for a replica.")
    prefix_weight: float = setting(
        8.0,
        "Requests that a fully cached prompt may wait behind rather than go to an idler replica; 0: load alone.",
    )
    routers: int = setting(1, "Ingress processes. Each one knows only what it has routed itself.")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "replicas", "requests_per_replica", "routers")
        check_at_least(self, 0, "cpus_per_replica", "prefix_weight")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas ({self.max_replicas}) is less than replicas ({self.replicas}).",
                param="max_replicas",
            )

"""What a Ray user gives becomes configs and deployment options; without Ray the message names the extra."""

from __future__ import annotations

import argparse
import sys

import pytest

from jaxserve.errors import ConfigError
from jaxserve.ray_serve import application, build
from jaxserve.ray_serve.application import SERVER_SETTINGS, add_flags, configs, replica_options
from jaxserve.ray_serve.config import RayServeConfig


def configs_of(*words: str) -> tuple[application.EngineConfig, application.ServerConfig, RayServeConfig]:
    parser = argparse.ArgumentParser()
    add_flags(parser, SERVER_SETTINGS)
    return configs(parser.parse_args(words))


def test_flags_of_engine_server_and_replicas_become_configs() -> None:
    engine, server, ray = configs_of(
        "--model", "m", "-tp", "4", "--replicas", "3", "--port", "80", "--api-key", "k"
    )
    assert (engine.model_config.model, engine.parallel_config.num_devices) == ("m", 4)
    assert (server.port, server.api_key, ray.replicas) == (80, ["k"], 3)


@pytest.mark.parametrize(
    "words",
    [
        {"replicas": "2", "max_model_len": "1k", "enforce-no-compile": "true", "hf_overrides": '{"a": 1}'},
        {"replicas": 2, "max_model_len": 1000, "enforce_no_compile": True, "hf_overrides": {"a": 1}},
    ],
    ids=["serve run", "config file"],
)
def test_arguments_come_as_strings_or_values(
    words: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[application.EngineConfig, application.ServerConfig, RayServeConfig]] = []
    monkeypatch.setattr(application, "build_application", lambda *given: seen.append(given))
    build({"model": "m", "seed": None, **words})
    engine, server, ray = seen[0]
    assert ray.replicas == 2
    assert server.page is False, "it may be that the whole network reaches Serve's proxy"
    assert (engine.model_config.max_model_len, engine.model_config.hf_overrides) == (1000, {"a": 1})
    assert engine.compilation_config.enforce_no_compile


@pytest.mark.parametrize(
    "words, name",
    [
        ({"replicas": "none"}, "replicas"),
        ({"no_such_thing": 1}, "no-such-thing"),
        ({"port": 80}, "port"),  # Serve's own
        ({"uds": "/x"}, "uds"),
        ({"nnodes": 2}, "nnodes"),  # an engine of one host each
        ({"max_replicas": 1, "replicas": 2}, "max_replicas"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(words: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        build(words)


def test_a_replica_gets_its_devices_and_serve_scales_when_asked() -> None:
    gpu = replica_options(RayServeConfig(replicas=2, accelerator="gpu"), 8, 5.0)
    assert gpu["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 8}
    assert (gpu["num_replicas"], gpu["graceful_shutdown_timeout_s"]) == (2, 5.0)
    tpu = replica_options(RayServeConfig(max_replicas=4, accelerator="tpu", cpus_per_replica=2), 4, 0.0)
    assert tpu["ray_actor_options"] == {"num_cpus": 2, "resources": {"TPU": 4}}
    assert "num_replicas" not in tpu
    assert (tpu["autoscaling_config"]["min_replicas"], tpu["autoscaling_config"]["max_replicas"]) == (1, 4)
    assert "num_gpus" not in replica_options(RayServeConfig(accelerator="cpu"), 1, 5.0)["ray_actor_options"]


def test_without_ray_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"jaxserve\[ray\]"):
        build({})

"""deploy/helm: the chart, rendered by Helm's own engine and checked against Kubernetes' schemas.

CI installs what these tests need (``.ci/run``); elsewhere they are skipped without it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.cli import serve

helm: Any = pytest.importorskip("helm_python", reason="Helm's engine: pip install helm-python-sdk")
kubernetes_validate: Any = pytest.importorskip(
    "kubernetes_validate", reason="pip install kubernetes-validate"
)

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "jaxserve"
VERSION = "1.34.0"
MULTI_HOST = {"accelerator": "tpu", "tpu": {"topology": "4x4", "chips": 4, "hosts": 4, "spot": True}}
SECRETS = {
    "apiKey": {"existingSecret": "keys"},
    "huggingFaceToken": {"existingSecret": "hub"},
    "metrics": {"credentialsKey": "prometheus"},
}
CASES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": {"accelerator": "gpu", "gpu": {"count": 2}, "resources": {"requests": {"cpu": "8"}}},
    "tpu": {"accelerator": "tpu", "model": "Qwen/Qwen3-8B", "args": ["--max-num-seqs", "64"]},
    "multi-host": MULTI_HOST,
    "secrets": SECRETS,
    "service monitor": {**SECRETS, "metrics": {"mode": "serviceMonitor", "credentialsKey": "prometheus"}},
    "pod monitoring": {"metrics": {"mode": "podMonitoring"}},
    "claims": {
        "cache": {"existingClaim": "mine"},
        "models": {"existingClaim": "weights"},
        "privileged": True,
    },
    "no volumes": {
        "cache": {"enabled": False},
        "runAsUser": 0,
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"c": "d"},
    },
}
WITHOUT_SCHEMA = {"JobSet", "ServiceMonitor", "PodMonitoring"}
"""Kinds that clusters learn from their controllers; a JobSet's job is checked all the same."""


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(str(CHART)) as loaded:
        yield loaded


def render(chart: Any, values: dict[str, Any], name: str = "demo") -> dict[str, dict[str, Any]]:
    """Objects by kind, each checked."""
    chart.validate_schema(values)
    found: dict[str, dict[str, Any]] = {}
    for path, text in chart.render(values, name=name, namespace="llm").items():
        if not path.endswith(".txt"):
            found |= {part["kind"]: part for part in yaml.safe_load_all(text) if part}
    for kind, item in found.items():
        if kind not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(item, VERSION, strict=True)
    return found


def pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if "Deployment" in objects:
        return objects["Deployment"]["spec"]["template"]
    return objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def test_helm_finds_nothing_wrong():
    report = helm.lint(str(CHART), strict=True)
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("case", CASES)
def test_what_is_rendered_is_valid(chart, case):
    objects = render(chart, CASES[case])
    spec = pod(objects)["spec"]
    (container,) = spec["containers"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    claim = objects.get("PersistentVolumeClaim", {"metadata": {"name": "mine"}})["metadata"]["name"]
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in spec["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == {"no volumes": [], "claims": ["mine", "weights"]}.get(case, [claim])
    labels = pod(objects)["metadata"]["labels"]
    selector = dict(objects["Service"]["spec"]["selector"])
    assert selector.pop("batch.kubernetes.io/job-completion-index", None) == (
        "0" if case == "multi-host" else None
    )
    assert selector.items() <= labels.items()
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 3600

    command, *arguments = container["args"]
    assert command == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    flags = parser.parse_args(arguments)
    assert (flags.host, flags.positional_model) == ("0.0.0.0", CASES[case].get("model"))
    assert flags.shutdown_timeout < spec["terminationGracePeriodSeconds"]


def test_accelerators_are_asked_for(chart):
    tpu = pod(render(chart, CASES["tpu"]))["spec"]
    assert tpu["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "2x4",
    }
    assert tpu["containers"][0]["resources"] == {
        "limits": {"google.com/tpu": 8},
        "requests": {"google.com/tpu": 8},
    }
    gpu = pod(render(chart, CASES["gpu"]))["spec"]["containers"][0]["resources"]
    assert gpu == {"limits": {"nvidia.com/gpu": 2}, "requests": {"cpu": "8"}}


def test_a_slice_of_several_hosts_is_one_server(chart):
    objects = render(chart, MULTI_HOST)
    assert "Deployment" not in objects
    jobset = objects["JobSet"]
    job = jobset["spec"]["replicatedJobs"][0]["template"]
    kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", **job}, VERSION, strict=True)
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (4, 4)
    assert jobset["spec"]["network"]["subdomain"] != objects["Service"]["metadata"]["name"]
    spec = job["spec"]["template"]["spec"]
    assert spec["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    (_, _, program) = spec["containers"][0]["readinessProbe"]["exec"]["command"]
    other = subprocess.run(
        [sys.executable, "-c", program], env={"JOB_COMPLETION_INDEX": "3"}, capture_output=True
    )
    assert other.returncode == 0, "a host that does not listen is not asked"
    with pytest.raises(helm.HelmRenderError, match="one server"):
        render(chart, {**MULTI_HOST, "replicas": 2})


def test_secrets_are_files_and_references(chart):
    objects = render(chart, CASES["service monitor"])
    (container,) = pod(objects)["spec"]["containers"]
    assert "/run/secrets/jaxserve/api-keys" in container["args"]
    assert any(item["name"] == "HF_TOKEN" and "valueFrom" in item for item in container["env"])
    (endpoint,) = objects["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "keys", "key": "prometheus"}
    assert "annotations" not in pod(render(chart, SECRETS))["metadata"]
    assert pod(render(chart, {}))["metadata"]["annotations"]["prometheus.io/port"] == "8000"
    with pytest.raises(helm.HelmRenderError, match="credentialsKey"):
        render(chart, {**SECRETS, "metrics": {"mode": "podMonitoring"}})


@pytest.mark.parametrize(
    "values",
    [
        {"accelerator": "cuda"},
        {"tpu": {"topology": "8"}},
        {"metrics": {"mode": "push"}},
        {"cache": {"sise": "1Gi"}},
    ],
)
def test_wrong_values_are_refused(chart, values):
    with pytest.raises(helm.HelmError):
        chart.validate_schema(values)

"""scripts/tpu_vm: what it asks of gcloud, told by a gcloud that records; and what its workers do, in another root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "tpu_vm"
GCLOUD = """#!/bin/bash
printf '%q ' "$@" >>"$FAKE_GCLOUD/calls"; echo >>"$FAKE_GCLOUD/calls"
case " $* " in
  *" scp "*) for name; do [ ! -f "$name" ] || cp "$name" "$FAKE_GCLOUD/"; done ;;
  *" describe "*)
    read -r state others <"$FAKE_GCLOUD/states"
    echo "${others:-$state}" >"$FAKE_GCLOUD/states"
    [ "$state" != ERROR ] || exit 1
    echo "$state" ;;
esac
[[ -z "$FAKE_GCLOUD_FAILS" || "$*" != *"$FAKE_GCLOUD_FAILS"* ]]
"""
PLACE = ["--zone", "us-east5-b", "--project", "p"]


class Cloud:
    """``tpu-vm`` with a gcloud that records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        executable(self._bin / "gcloud", GCLOUD)
        (folder / "states").write_text("ACTIVE")

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPTS / "tpu-vm", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={
                **os.environ, "PATH": f"{self._bin}:{os.environ['PATH']}", "FAKE_GCLOUD": str(self.folder),
                "TPU_VM_POLL_SECONDS": "0", **environment,
            },
        )  # fmt: skip

    def calls(self) -> list[list[str]]:
        """The arguments of each gcloud, once."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [shlex.split(line) for line in lines]


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def commands(calls: list[list[str]]) -> list[tuple[str, str]]:
    """(worker, what is run there) of every ssh."""
    found = []
    for call in calls:
        flags = dict(part.split("=", 1) for part in call if part.startswith("--") and "=" in part)
        if "ssh" in call:
            found.append((flags["--worker"], flags["--command"].strip()))
    return found


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path)


def test_create_asks_once_and_waits(cloud):
    (cloud.folder / "states").write_text("ACCEPTED WAITING_FOR_RESOURCES ERROR PROVISIONING ACTIVE")
    done = cloud("create", "llm", *PLACE, "--accelerator-type", "v6e-16", "--spot", "--valid-until", "6h")
    assert done.returncode == 0, done.stderr
    create, *waits = cloud.calls()
    assert create == [
        *("compute", "tpus", "queued-resources", "create", "--zone=us-east5-b", "--project=p", "llm"),
        *("--node-id=llm", "--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e"),
        *("--spot", "--valid-until-duration=6h"),
    ]
    assert len(waits) == 5
    states = ["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
    assert done.stdout.splitlines()[:-1] == [f"llm: {state}" for state in states]
    assert "is billed until 'tpu-vm delete llm" in done.stdout


@pytest.mark.parametrize(
    "states,message", [("ACCEPTED FAILED", "ended as FAILED"), ("ERROR", "does not tell the state")]
)
def test_create_that_fails(cloud, states, message):
    (cloud.folder / "states").write_text(states)
    done = cloud("create", "llm", *PLACE, "--accelerator-type", "v5litepod-8")
    assert done.returncode == 1
    assert message in done.stderr
    assert "--runtime-version=v2-alpha-tpuv5-lite" in cloud.calls()[0]


def test_install_sends_the_checkout_to_all_workers(cloud):
    done = cloud("install", "llm", *PLACE, "--internal-ip")
    assert done.returncode == 0, done.stderr
    calls = cloud.calls()
    assert all("--internal-ip" in call and "--worker=all" in call for call in calls)
    (_, before), (_, setup) = commands(calls)
    assert before == "mkdir -p -m 700 jaxserve-setup"
    assert setup.startswith("sudo bash jaxserve-setup/setup.sh install 2")
    assert setup.endswith("checkout tpu")
    assert (cloud.folder / "jaxserve.service").exists()
    assert (cloud.folder / "jaxserve.tar.gz").stat().st_size > 100_000


def test_serve_quotes_its_arguments_and_keeps_secrets_off_them(cloud):
    keys, environment = cloud.folder / "keys.txt", cloud.folder / "env.txt"
    keys.write_text("sesame\n")
    environment.write_text("HF_TOKEN=hf_1\n")
    model = ["Qwen/Qwen3-8B", "--hf-overrides", '{"a": "it\'s $HOME"}', "--tensor-parallel-size", "4"]
    files = ["--api-key-file", str(keys), "--env-file", str(environment)]
    done = cloud("serve", "llm", *PLACE, *files, "--", *model)
    assert done.returncode == 0, done.stderr
    calls = cloud.calls()
    line = (cloud.folder / "serve").read_text().splitlines()[-1]
    program, *given = shlex.split(line.removeprefix("exec "))
    assert program == "/opt/jaxserve/current/bin/jaxserve"
    assert given == ["serve", *model, "--api-key-file", "/etc/jaxserve/api_keys"]
    assert (cloud.folder / "api_keys").read_text() == "sesame\n"
    assert (cloud.folder / "environment").read_text() == "HF_TOKEN=hf_1\n"
    assert "sesame" not in str(calls) + done.stdout + line
    setup = "sudo bash jaxserve-setup/setup.sh"
    assert commands(calls)[1:] == [
        ("all", f"{setup} configure"), ("all", f"{setup} restart"), ("0", f"{setup} ready 1800"),
    ]  # fmt: skip


def test_an_upgrade_that_does_not_become_ready_goes_back(cloud):
    done = cloud(
        "upgrade", "llm", *PLACE, "--source", "0.2.0", "--ready-seconds", "5", FAKE_GCLOUD_FAILS="ready 5"
    )
    assert done.returncode == 1
    assert "going back" in done.stderr
    actions = [command.split()[3:] for worker, command in commands(cloud.calls())[1:]]
    assert [action[0] for action in actions] == [
        "install",
        "restart",
        "ready",
        "rollback",
        "restart",
        "ready",
    ]
    assert actions[0][2:] == ["0.2.0", "tpu"]
    assert cloud("upgrade", "llm", *PLACE, "--source", "0.2.0").returncode == 0
    actions = [command.split()[3] for _, command in commands(cloud.calls())[1:]]
    assert actions == ["install", "restart", "ready"]


def test_logs_tunnel_status_delete(cloud):
    assert cloud("logs", "llm", *PLACE, "--worker", "2", "--follow").returncode == 0
    assert commands(cloud.calls()) == [
        ("2", "sudo journalctl --no-pager --unit=jaxserve --lines=200 --follow")
    ]
    assert cloud("tunnel", "llm", *PLACE, "--port", "9000").returncode == 0
    assert cloud.calls()[0][-5:] == ["--worker=0", "--", "-N", "-L", "9000:127.0.0.1:8000"]
    assert cloud("status", "llm", *PLACE).stdout == "ACTIVE\n"
    cloud.calls()
    assert cloud("delete", "llm", *PLACE).returncode == 0
    assert cloud.calls()[0][2:4] == ["queued-resources", "delete"]


@pytest.mark.parametrize(
    "command", ["create", "install", "serve", "upgrade", "delete", "logs", "status", "rollback"]
)
def test_a_dry_run_prints_what_would_be_run(cloud, command):
    more = {"create": ["--accelerator-type", "v6e-8"], "serve": ["--", "m"]}.get(command, [])
    dry = cloud(command, "llm", *PLACE, "--dry-run", *more)
    assert dry.returncode == 0, dry.stderr
    assert cloud.calls() == []
    assert cloud(command, "llm", *PLACE, *more).returncode == 0
    printed = [shlex.split(line) for line in dry.stdout.splitlines() if line.startswith("gcloud")]
    assert [call[1:5] for call in printed] == [call[:4] for call in cloud.calls()]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["destroy", "llm"], "no command is called 'destroy'"),
        (["create", "LLM", *PLACE], "lower-case"),
        (["create", "llm"], "no zone"),
        (["create", "llm", *PLACE], "--accelerator-type"),
        (["create", "llm", *PLACE, "--accelerator-type", "v99-8"], "--runtime-version"),
        (["serve", "llm", *PLACE], "needs a model"),
        (["serve", "llm", "model", *PLACE], "one name too many"),
        (["serve", "llm", *PLACE, "--", "m", "--port=1"], "leave --port out"),
        (["serve", "llm", *PLACE, "--", "m", "--api-key", "k"], "--api-key-file"),
        (["serve", "llm", *PLACE, "--max-num-seqs", "8"], "go after --"),
        (["serve", "llm", *PLACE, "--api-key-file", "/none", "--", "m"], "cannot be read"),
        (["logs", "llm", *PLACE, "--lines", "ten"], "must be a number"),
        (["logs", "llm", *PLACE, "--lines"], "needs a value"),
    ],
)
def test_mistakes_are_named_before_anything_runs(cloud, arguments, message):
    done = cloud(*arguments)
    assert done.returncode == 2, done
    assert message in done.stderr
    assert cloud.calls() == []


# --- on a worker ------------------------------------------------------------------------------------------

WORKER = {
    "id": "exit 0",
    "python3": 'mkdir -p "$3/bin"; cp "$TOOLS/uv" "$3/bin/uv"; cp "$TOOLS/true" "$3/bin/pip"',
    "uv": 'if [ "$1" = venv ]; then mkdir -p "${!#}/bin"; cp "$TOOLS/true" "${!#}/bin/jaxserve"; fi; '
    'echo "uv $*" >>"$TOOLS/log"',
    "true": "exit 0",
    "systemctl": 'echo "systemctl $*" >>"$TOOLS/log"',
    "journalctl": "echo the log",
    "curl": 'test -e "$TOOLS/healthy"',
    "install": 'while [ $# -gt 2 ]; do shift; done; cp "$1" "$2"',
}
"""What a worker has, for setup.sh: each as a line of bash."""


class Worker:
    """``setup.sh`` on a machine of files."""

    def __init__(self, folder: Path) -> None:
        self.root, self.tools, self.sent = folder / "root", folder / "tools", folder / "sent"
        for path in (self.root / "etc" / "systemd" / "system", self.tools, self.sent):
            path.mkdir(parents=True)
        for name, line in WORKER.items():
            executable(self.tools / name, f"#!/bin/bash\n{line}\n")
        for name in ("setup.sh", "jaxserve.service"):
            shutil.copy(SCRIPTS / name, self.sent)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment: Mapping[str, str] = {
            **os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}", "TOOLS": str(self.tools),
            "JAXSERVE_SETUP_ROOT": str(self.root),
        }  # fmt: skip
        command = ["bash", str(self.sent / "setup.sh"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    def link(self, name: str) -> str:
        return (self.root / "opt" / "jaxserve" / name).readlink().name

    def log(self) -> str:
        return (self.tools / "log").read_text()


def test_a_worker_keeps_two_releases_and_goes_back(tmp_path):
    worker = Worker(tmp_path)
    assert worker("restart").returncode == 1, "nothing was configured"
    assert worker("rollback").returncode == 1, "there is one release at most"
    for release, source in (("one", "0.1.0"), ("two", "https://a/b.whl"), ("three", "jaxserve==0.3.0")):
        done = worker("install", release, source, "tpu")
        assert done.returncode == 0, done.stderr
    for requirement in ("jaxserve[tpu]==0.1.0", "jaxserve[tpu] @ https://a/b.whl", "jaxserve[tpu]==0.3.0"):
        assert requirement in worker.log()
    assert (worker.link("current"), worker.link("previous")) == ("three", "two")
    assert sorted(path.name for path in (worker.root / "opt/jaxserve/releases").iterdir()) == ["three", "two"]
    assert worker("rollback").returncode == 0
    assert (worker.link("current"), worker.link("previous")) == ("two", "three")
    assert (worker.root / "etc/systemd/system/jaxserve.service").exists()

    for name in ("serve", "environment", "api_keys"):
        (worker.sent / name).write_text(name)
    assert worker("configure").returncode == 0
    assert not (worker.sent / "api_keys").exists()
    assert worker("restart").returncode == 0
    assert "systemctl restart jaxserve" in worker.log()
    slow = worker("ready", "0")
    assert (slow.returncode, slow.stderr) == (1, "the log\n")
    (worker.tools / "healthy").touch()
    assert worker("ready", "60").returncode == 0
    assert worker("explode").returncode == 2

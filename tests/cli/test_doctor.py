from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rill.cli import doctor
from rill.cli.doctor import EXTRAS, State
from rill.cli.main import app


def test_the_report_covers_the_machine_and_every_extra() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    findings = {finding["what"]: finding for finding in json.loads(result.output)}
    for what in ("python", "torch", "cpu", "memory", "shared memory", "disk"):
        assert findings[what]["state"] in ("ok", "warning")
    for package, _, _ in EXTRAS.values():
        assert findings[package]["state"] in ("ok", "absent")


def test_every_extra_in_the_table_is_one_of_the_packages() -> None:
    provided = metadata.metadata("rill").get_all("Provides-Extra") or []
    for _, extra, _ in EXTRAS.values():
        assert extra in provided


def test_no_gpu_is_a_warning_only_where_there_should_be_one() -> None:
    assert doctor._no_cuda(has_driver=False, has_cuda_build=True).state is State.ABSENT
    assert "nvidia-smi" in doctor._no_cuda(has_driver=True, has_cuda_build=True).advice
    assert "CUDA build" in doctor._no_cuda(has_driver=True, has_cuda_build=False).advice


def test_an_absent_extra_comes_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    finding = doctor._extra("ray")
    assert finding.state is State.ABSENT
    assert 'pip install "rill[ray]"' in finding.advice


def test_a_missing_core_library_is_broken_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["no-such-library>=2"])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert 'pip install "no-such-library>=2"' in result.output
    assert "not ready: fix no-such-library first" in result.output


def test_little_shared_memory_is_a_warning_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(64 << 20, 0, 64 << 20))
    finding = doctor._shared_memory(tmp_path)
    assert finding.state is State.WARNING
    assert "--shm-size" in finding.advice


def test_a_machine_without_a_compiler_is_told_what_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    finding = doctor._compiler()
    assert finding.state is State.WARNING and "install g++" in finding.advice


def test_a_machine_without_a_sandbox_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rill.envs.sandbox.missing", lambda: "apt install bubblewrap")
    finding = doctor._sandbox()
    assert finding.state is State.WARNING and "apt install bubblewrap" in finding.advice


def test_containers_that_cannot_be_had_are_absent_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor._containers()
    assert finding.state is State.ABSENT and "apt install podman" in finding.advice
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    docker.chmod(0o755)
    assert "docker does not answer (Cannot connect" in doctor._containers().advice
    docker.write_text("#!/bin/sh\n")
    assert doctor._containers() == doctor.Finding("containers", State.OK, "docker")


def test_a_missing_system_package_comes_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    assert doctor._compiler().advice.endswith("sudo apt install g++")
    monkeypatch.setattr("shutil.which", lambda name: "/sbin/apk" if name == "apk" else None)
    assert doctor._compiler().advice.endswith("sudo apk add g++")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert doctor._compiler().advice.endswith("install g++")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    assert doctor._headers().state is State.WARNING

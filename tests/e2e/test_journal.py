"""What a finished run leaves behind: checkpoints and a token log that can be checked, exported and read."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rill.cli.main import app
from rill.telemetry.run import Run
from tests.e2e.tiny import STEPS, fingerprint


def rill(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.timeout(400)
def test_a_run_is_verified_diagnosed_and_exported_from_its_folder(whole: Run, tmp_path: Path) -> None:
    code, said = rill("runs", "verify", str(whole.path))
    assert code == 0 and f"step {STEPS} whole" in said and "0 of them under way" in said
    assert rill("doctor", str(whole.path)) == (
        0,
        f"{whole.path}: finished, after step {STEPS} nothing is wrong that its files would tell",
    )
    code, said = rill("runs", "export", str(whole.path), "-o", str(tmp_path / "model"))
    assert code == 0 and f"the policy after step {STEPS}" in said
    exported = hashlib.sha256((tmp_path / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert exported.startswith(fingerprint(whole))
    code, said = rill("runs", "export", str(whole.path), "--step", "99", "-o", str(tmp_path / "other"))
    assert code == 2 and f"has checkpoints of steps {STEPS - 2}, {STEPS}" in said

    hurt = tmp_path / "hurt"
    shutil.copytree(whole.path, hurt)
    weights = max((hurt / "checkpoints" / f"step-{STEPS:06d}" / "actor").rglob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    code, said = rill("runs", "verify", str(hurt))
    assert code == 1 and f"{weights.name} is damaged" in said


@pytest.mark.timeout(400)
def test_a_run_is_not_resumed_with_another_model(whole: Run) -> None:
    code, said = rill("train", "--resume", str(whole.path), "model.shape.hidden_size=32")
    assert code == 2 and "model.shape.hidden_size = 32 does not fit the checkpoints" in said
    assert (whole.path / "journal").exists()

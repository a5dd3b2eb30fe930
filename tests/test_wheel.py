"""The wheel, installed without a checkout: the command works and the recipes are inside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("hatchling")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True, timeout=300, capture_output=True)


def test_the_wheel_needs_no_checkout(tmp_path: Path) -> None:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT))
    [wheel] = tmp_path.glob("rill-*.whl")
    place = tmp_path / "installed"
    pip("install", "--no-deps", "--no-index", "--target", str(place), str(wheel))

    def rill(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "rill.cli.main", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = rill("recipes")
    assert str(place / "rill" / "recipes" / "demo.toml") in listed
    assert (place / "rill" / "recipes" / "parts" / "gsm8k.toml").is_file()
    assert (place / "rill" / "dashboard" / "static").is_dir()
    assert (place / "bin" / "rill").is_file()
    assert 'workflow = "grpo"' in rill("config", "show", "demo")

"""Scratch folders: gone when closed, when their process ends, and after a kill when the next is opened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rill.runtime.process.scratch import ScratchFolder
from rill.runtime.process.session import sweep

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(60)


def left_by(last_words: str, root: Path) -> Path:
    """The folder of a process that filled one and then did that."""
    code = (
        "import os, signal\nfrom rill.runtime.process.scratch import ScratchFolder\n"
        f"folder = ScratchFolder('test', {str(root)!r})\n(folder.path / 'weights').write_bytes(b'x' * 1000)\n"
        f"print(folder.path, flush=True)\n{last_words}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    return Path(done.stdout.strip())


def test_a_killed_process_leaves_its_folder_to_the_next_and_a_living_ones_stays(tmp_path: Path) -> None:
    with ScratchFolder("living", tmp_path) as living:
        orphan = left_by(f"os.kill(os.getpid(), {int(signal.SIGKILL)})", tmp_path)
        assert (orphan / "weights").exists()
        with ScratchFolder("next", tmp_path):
            assert not orphan.exists()
        assert living.path.is_dir() and os.listdir(tmp_path) == [living.path.name]
    assert os.listdir(tmp_path) == []


def test_a_process_that_ends_in_order_or_with_an_error_leaves_nothing(tmp_path: Path) -> None:
    for last_words in ("", "raise RuntimeError"):
        assert not left_by(last_words, tmp_path).exists()


def test_the_default_place_is_swept_by_every_session() -> None:
    folder = ScratchFolder("test")
    (folder.path / "weights").write_bytes(b"x")
    assert folder.path.name not in sweep(folder.path.parent)
    folder._lock.close()  # as a kill would
    assert folder.path.name in sweep(Path("/nowhere"))
    assert not folder.path.exists()

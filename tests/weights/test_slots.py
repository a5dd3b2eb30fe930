"""Stamps of two slots, and folders that outlive their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rill.errors import WeightSyncError
from rill.runtime.cluster import Cluster
from rill.runtime.worker import Worker
from rill.types import PolicyVersion
from rill.weights.slots import SlotStamps


def test_a_slot_is_readable_only_while_it_holds_the_version(tmp_path: Path) -> None:
    stamps = SlotStamps.create(str(tmp_path))
    reader = SlotStamps(stamps.folder)
    with pytest.raises(WeightSyncError, match="nothing readable"):
        reader.check(0, PolicyVersion(1))
    stamps.set(0, PolicyVersion(1))
    reader.check(0, PolicyVersion(1))
    with pytest.raises(WeightSyncError, match="holds version 1"):
        reader.check(0, PolicyVersion(2))
    stamps.clear(0)
    with pytest.raises(WeightSyncError, match="nothing readable"):
        reader.check(0, PolicyVersion(1))


def test_a_killed_owners_folder_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path: Path) -> None:
    code = (
        "import os, signal\nfrom rill.weights.slots import SlotStamps\n"
        f"stamps = SlotStamps.create({str(tmp_path)!r})\n"
        "print(stamps.folder, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(__file__).parents[2])
    killed = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    orphan = Path(killed.stdout.strip())
    assert orphan.is_dir()
    living = SlotStamps.create(str(tmp_path))
    strange = tmp_path / "rill-weights-of-another-kind"
    strange.mkdir()
    SlotStamps.create(str(tmp_path)).close()
    assert not orphan.exists()
    assert Path(living.folder).is_dir() and strange.is_dir()
    living.close()
    assert not Path(living.folder).exists()


class Publishing(Worker):
    def publish(self) -> str:
        self.stamps = SlotStamps.create()
        Path(self.stamps.folder, "weights").write_bytes(b"x" * 1000)
        return self.stamps.folder


def test_in_a_cluster_a_killed_publishers_folder_goes_with_the_session() -> None:
    with Cluster(devices="cpu:1") as cluster:
        publisher = Publishing.launch(cluster, name="publisher")
        (folder,) = publisher.publish().wait(60)
        assert Path(folder).parent == cluster.session.shm_dir
        os.kill(publisher.addresses()[0].pid, signal.SIGKILL)
        assert Path(folder, "weights").exists()
    assert not Path(folder).exists()

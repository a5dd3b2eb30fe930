"""Stamps of two slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.errors import WeightSyncError
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

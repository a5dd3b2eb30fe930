"""Stamps of two slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.errors import WeightSyncError
from rill.types import PolicyVersion
from rill.weights.slots import NOT_READABLE, check_stamp, write_stamp


def test_a_slot_is_readable_only_while_it_holds_the_version(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(WeightSyncError, match="nothing readable"):
        check_stamp(folder, 0, PolicyVersion(1))
    write_stamp(folder, 0, 1)
    check_stamp(folder, 0, PolicyVersion(1))
    with pytest.raises(WeightSyncError, match="holds version 1"):
        check_stamp(folder, 0, PolicyVersion(2))
    write_stamp(folder, 0, NOT_READABLE)
    with pytest.raises(WeightSyncError, match="nothing readable"):
        check_stamp(folder, 0, PolicyVersion(1))

"""Copies in parts are copies."""

from __future__ import annotations

import numpy as np
import pytest

from rill.runtime.transfer import memory_copy
from rill.runtime.transfer.memory_copy import PART_BYTES, copy_bytes


@pytest.mark.parametrize("num_cores", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "num_bytes", [1, 4096, PART_BYTES, 2 * PART_BYTES - 1, 2 * PART_BYTES, 3 * PART_BYTES + 12_345]
)
def test_every_byte_arrives_whatever_the_parts(
    num_bytes: int, num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_copy, "_num_cores", lambda: num_cores)
    source = np.random.default_rng(num_bytes).integers(0, 255, num_bytes, dtype=np.uint8)
    target = bytearray(num_bytes)
    copy_bytes(target, source)
    assert target == source.tobytes()

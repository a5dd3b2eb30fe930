"""One program, two placements: nothing in the workers changes."""

from __future__ import annotations

import pytest

from rill import Cluster
from tests.runtime.figure_five import run

pytestmark = pytest.mark.timeout(110)

EXPECTED = [2 * sum(range(12))] * 3


def test_the_program_runs_with_both_groups_on_the_same_devices() -> None:
    with Cluster(devices="cpu:2") as cluster:
        assert run(cluster, "0-1", "0-1", num_steps=3, batch_size=12) == EXPECTED


def test_the_same_program_runs_with_the_groups_on_devices_of_their_own() -> None:
    with Cluster(devices="cpu:2") as cluster:
        assert run(cluster, "0", "1", num_steps=3, batch_size=12) == EXPECTED

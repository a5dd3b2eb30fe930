"""The paper's program with both groups on the same devices; test_two_nodes.py runs it with a group on each node."""

from __future__ import annotations

import pytest

from rill import Cluster
from tests.runtime.figure_five import run

pytestmark = pytest.mark.timeout(110)


def test_the_program_runs_with_both_groups_on_the_same_devices() -> None:
    with Cluster(devices="cpu:2") as cluster:
        assert run(cluster, "0-1", "0-1", num_steps=3, batch_size=12) == [2 * sum(range(12))] * 3

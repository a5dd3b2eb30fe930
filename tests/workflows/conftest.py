"""One cluster for all scenes: its processes fork from an agent that has imported everything already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rill.runtime.cluster import Cluster
from tests.forks import forked_agents


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    with forked_agents():
        made = Cluster(devices=2, preload=("tests.workflows.scene", "transformers"))
    with made:
        yield made


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """No scene outlives its test, however that ends."""
    yield shared_cluster
    from tests.workflows.scene import Scene

    while Scene.alive:
        Scene.alive.pop().close()

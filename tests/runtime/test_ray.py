"""The Ray backend, on a Ray cluster that the test starts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rill.errors import PeerDiedError
from rill.runtime.cluster import Cluster
from tests.runtime.workers import Echo, Peer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.ray("local", devices="cpu:2") as cluster:
        yield cluster


def test_a_group_runs_on_ray_as_it_does_locally(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="echo", placement="0-1", threads=1, base=1)
    assert group.plus(1).wait(30) == [2, 2]
    np.testing.assert_array_equal(group.echo(np.arange(100_000)).wait(30)[1], np.arange(100_000))
    with pytest.raises(PeerDiedError, match="exit code 4"):
        group.on(1).die(4).wait(30)
    group.relaunch(1)
    assert group.plus(2).wait(30) == [3, 3]
    group.close()


def test_workers_on_ray_do_not_import_ray(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="plain", placement="0", threads=1)
    assert group.modules("ray").wait(30) == [[]]
    group.close()


def test_transfers_work_on_ray(cluster: Cluster) -> None:
    group = Peer.launch(cluster, name="pair", placement="0-1", threads=1)
    assert group.swap(400_000).wait(30) == [True, True]
    group.close()

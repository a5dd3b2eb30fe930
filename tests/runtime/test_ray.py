"""The Ray backend, on a Ray cluster that the test starts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rill.errors import PeerDiedError, RunError
from rill.runtime.cluster import Cluster
from tests.runtime.leftovers import becomes_true
from tests.runtime.workers import Echo, Peer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


def test_nodes_join_a_ray_cluster_leave_it_and_are_lost() -> None:
    """Several of Ray's nodes on one machine; each with an agent of its own. First: the others' Ray cluster, once it is
    there, is this process's."""
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    rays = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        with Cluster.ray(rays.address, devices="cpu:1") as cluster:
            group = Echo.launch(cluster, name="echo", threads=1, base=1)
            with pytest.raises(RunError, match="no further node"):
                cluster.add_node("cpu:1")
            raylet = rays.add_node(num_cpus=1)
            assert becomes_true(lambda: sum(raw["Alive"] for raw in ray.nodes()) == 2, 150)
            node = cluster.add_node("cpu:2", labels=["late"])
            assert group.add(placement="late:all", timeout_s=60) == [1, 2]
            assert [address.node_id for address in group.addresses()] == ["node0", node.node_id, node.node_id]
            assert group.plus(1).wait(30) == [2, 2, 2]
            cluster.remove_node(node.node_id)
            assert group.ranks == (0,)
            again = cluster.add_node("cpu:1")
            (rank,) = group.add(count=1, timeout_s=60)
            waiting = group.on(rank).sleep(120)
            rays.remove_node(raylet, allow_graceful=False)
            with pytest.raises(PeerDiedError, match=f"{again.node_id} is lost"):
                waiting.wait(120)
            assert group.lost() == [rank]
            group.remove(rank)
            assert group.plus(1).wait(30) == [2]
            assert [device.node_id for device in cluster.devices] == ["node0"]
    finally:
        rays.shutdown()


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

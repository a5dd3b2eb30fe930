"""Several nodes rehearsed on one machine: everything between them goes over TCP, under the session's key."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from rill import Channel, Cluster
from rill.errors import PeerDiedError, StuckError
from rill.runtime.group import WorkerGroup
from rill.runtime.process.backend import LocalBackend
from rill.runtime.transfer import store as store_module
from tests.runtime.figure_five import run
from tests.runtime.leftovers import hub_pid
from tests.runtime.two_hosts_script import Host

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(backend=LocalBackend("cpu:1", num_nodes=2)) as made:
        yield made


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> WorkerGroup[Host]:
    return Host.launch(cluster, name="host", threads=1)


def test_objects_of_every_size_cross_between_nodes(cluster: Cluster, group: WorkerGroup[Host]) -> None:
    assert [node for node, _ in group.where().wait(30)] == ["node0", "node1"]
    sending = group.on(0).send_array(3_000_000)
    assert group.on(1).receive_array().wait(60) == [3_000_000]
    assert sending.wait(60)[0]["tcp"] == 1
    assert group.share(5_000_000).wait(60) == [5_000_000] * 2
    channel = Channel.create(cluster, "items1")
    consuming = group.on(1).consume(channel)
    group.on(0).produce(channel, 20).wait(60)
    channel.end()
    assert consuming.wait(60) == [list(range(20))]


def test_a_killed_store_server_loses_no_item_and_no_object(
    cluster: Cluster, group: WorkerGroup[Host]
) -> None:
    channel = Channel.create(cluster, "items2")
    group.on(0).produce(channel, 20).wait(60)
    sending = group.on(0).send_array(3_000_000)
    channel.end()
    for _ in range(2):  # the readers have a connection to the first when the second is killed
        os.kill(store_server_of(cluster, "node0"), signal.SIGKILL)
        assert group.on(1).receive_array().wait(60) == [3_000_000]
        sending.wait(60)
        sending = group.on(0).send_array(3_000_000)
    assert group.on(1).consume(channel).wait(60) == [list(range(20))]
    assert group.on(1).receive_array().wait(60) == [3_000_000]
    sending.wait(60)


def store_server_of(cluster: Cluster, node_id: str) -> int:
    """Its process id, which is in its name."""
    members = cluster.context.hub.call("registry.members", None, 10)
    (server,) = (member for member in members if member.startswith(f"store-{node_id}["))
    return int(server.rpartition("#")[2])


def test_an_item_that_could_not_be_fetched_is_not_finished(
    cluster: Cluster, group: WorkerGroup[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_FETCH_WAIT_S", 1.0)
    impatient = store_module.open_store(cluster.context)
    monkeypatch.setattr(cluster.context.store, "_fetch", impatient._fetch)
    channel = Channel.create(cluster, "items3")
    group.on(1).produce(channel, 3).wait(60)
    server = store_server_of(cluster, "node1")
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(StuckError, match="node1's store sent no part"):
        channel.take(timeout_s=30)
    os.kill(server, signal.SIGCONT)
    assert [int(channel.take(timeout_s=30)[0]) for _ in range(3)] == [0, 1, 2]


def test_a_peer_on_another_node_that_dies_ends_the_waits_on_it(
    cluster: Cluster, group: WorkerGroup[Host]
) -> None:
    waiting = group.on(0).wait_for(1)
    os.kill(group.addresses()[1].pid, signal.SIGKILL)
    error = waiting.outcomes(30)[0].error
    assert isinstance(error, PeerDiedError) or "host[1]" in str(error)
    group.relaunch(1)
    for doubled in group.double(np.arange(1_000_000)).wait(60):
        assert (doubled == 2 * np.arange(1_000_000)).all()


def test_the_program_of_figure_five_runs_with_a_group_on_each_node(cluster: Cluster) -> None:
    assert run(cluster, "0", "1", num_steps=2, batch_size=12) == [2 * sum(range(12))] * 2


def test_the_key_of_a_session_shows_nowhere(cluster: Cluster, group: WorkerGroup[Host]) -> None:
    group.where().wait(30)
    key = cluster.context.site.key
    assert key is not None
    folder = cluster.session.session_dir
    shown = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                shown.append((process / name).read_bytes())
            except OSError:  # it ended, or is not ours
                continue
    assert not any(key.secret in text or key.public in text for text in shown)


def test_a_node_s_default_threads_are_its_own_cores(cluster: Cluster) -> None:
    assert all(node.num_cores == len(os.sched_getaffinity(0)) for node in cluster.nodes)


def test_a_node_whose_agent_dies_gets_its_store_server_again_and_no_second_hub(
    cluster: Cluster, group: WorkerGroup[Host]
) -> None:
    hub = hub_pid(cluster)
    waiting = group.on(1).wait_for(0)
    os.kill(cluster._nodes["node1"].agent_pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(PeerDiedError, match="agent of node1"):
        waiting.wait(30)
    group.relaunch(1)
    sending = group.on(0).send_array(3_000_000)
    assert group.on(1).receive_array().wait(60) == [3_000_000]
    sending.wait(60)
    assert hub_pid(cluster) == hub
    agents = [client.agent_pid for client in cluster._nodes.values()]  # type: ignore[attr-defined]
    children = [child.name() for agent in agents for child in psutil.Process(agent).children()]
    assert children.count("hub") == 1

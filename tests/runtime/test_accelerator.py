"""Accelerators: the two that rill has, those that users register, and nodes that differ in what they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rill.errors import PlanError, UnknownNameError, UnsupportedError
from rill.runtime.cluster import Cluster
from rill.runtime.device.accelerator import ACCELERATORS, accelerator, accelerator_of
from rill.runtime.device.device import Device, Node, devices_of_nodes, local_devices
from rill.runtime.process.backend import LocalBackend
from tests.runtime.npu import Seated
from tests.runtime.workers import Echo

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def npus() -> Iterator[None]:
    ACCELERATORS.register("npu", "tests.runtime.npu:Npu")
    yield
    ACCELERATORS._parts.pop("npu", None)


def test_a_registered_kind_is_counted_named_and_shown_to_its_processes_only() -> None:
    with Cluster(devices="npu:auto,cpu:1") as cluster:
        echo = Echo.launch(cluster, name="npus", placement="npu:1-2:0", threads=1)
        other = Echo.launch(cluster, name="cpus", placement="cpu:0", threads=1)
        assert echo.environment("TEST_NPUS").wait(20) == [{"TEST_NPUS": "1,2"}]
        assert other.environment("TEST_NPUS").wait(20) == [{"TEST_NPUS": ""}]
        assert (
            Seated.launch(cluster, name="seated", placement="npu:all").seat().wait(20)
            == [("npu:0", [""])] * 3
        )


def test_auto_takes_what_can_be_counted_before_cpu_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [device.kind for device in local_devices("auto")] == ["npu"] * 3
    ACCELERATORS._parts.pop("npu")
    assert {device.kind for device in local_devices("auto")} == {"cpu"}
    with pytest.raises(PlanError, match="nothing is known that counts 'npu'"):
        local_devices("npu:auto")


def test_nodes_of_mixed_hardware_have_devices_by_label() -> None:
    arm = Device(kind="arm", options={"address": "10.0.0.7"})
    backend = LocalBackend(
        {"trainers": "npu:2", "lab": [arm], "*": "cpu:1"},
        num_nodes=3,
        node_labels=[["trainers"], ["lab", "second floor"]],
    )
    with Cluster(backend=backend) as cluster:
        assert [(device.kind, device.node_id) for device in cluster.devices] == [
            ("npu", "node0"),
            ("npu", "node0"),
            ("arm", "node1"),
            ("cpu", "node2"),
        ]
        by_label = Seated.launch_async(cluster, name="by-label", placement="lab:all", threads=1)
        by_kind = Seated.launch_async(cluster, name="by-kind", placement="cpu:0", threads=1)
        assert by_label.seat().wait(20) == [("cpu", ["10.0.0.7"])]
        assert by_kind.seat().wait(20) == [("cpu", [""])]


def test_a_label_that_no_node_has_or_that_two_share_is_refused() -> None:
    nodes = [Node(node_id="node0", labels=frozenset({"a", "b"})), Node(node_id="node1")]
    with pytest.raises(PlanError, match=r"no node has the label or id 'c'; there are a, b, node0, node1"):
        devices_of_nodes({"c": "cpu:1"}, nodes)
    with pytest.raises(PlanError, match="node0 is meant by 'a' and 'b'"):
        devices_of_nodes({"a": "cpu:1", "b": "cpu:2"}, nodes)
    with pytest.raises(UnknownNameError, match="'cuda' is taken"):
        ACCELERATORS.register("cuda", "tests.runtime.npu:Npu")


def test_more_devices_than_there_are_cannot_be_had_but_cpu_slots_can() -> None:
    with pytest.raises(PlanError, match="4 devices of kind 'npu' asked for, this machine shows 3"):
        local_devices("npu:4")
    assert len(local_devices("cpu:512")) == 512


def test_the_processor_shares_no_memory_by_handles() -> None:
    cpu = accelerator("cpu")
    tensor = torch.ones(3)
    found = accelerator_of(tensor)
    assert found is not None and found[0] == "cpu" and not cpu.has_ipc
    cpu.synchronize(tensor.device)
    with pytest.raises(UnsupportedError, match="cannot be opened by another process"):
        cpu.export(tensor)


def test_gpus_are_those_that_the_environment_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = accelerator("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    assert list(cuda.devices() or ()) == [5, 2]
    assert [device.index for device in local_devices("cuda:1")] == [5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(cuda.devices() or ()) == []

"""Placement texts and what they give each process."""

from __future__ import annotations

import pytest

from rill.errors import PlanError
from rill.runtime.device.device import (
    Device,
    local_devices,
    number,
    torch_device,
    visible_devices_env,
)
from rill.runtime.device.placement import resolve

FOUR = number([Device(kind="cpu", index=n) for n in range(4)])


def ids(placement: object, devices: tuple[Device, ...] = FOUR) -> list[list[int]]:
    return [[device.id for device in seat.devices] for seat in resolve(placement, devices)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("all", [[0], [1], [2], [3]]),
        ("0-1", [[0], [1]]),
        ("0,2", [[0], [2]]),
        ("3", [[3]]),
        (2, [[2]]),
        ("0-3:0-1", [[0, 1], [2, 3]]),
        ("0-1:0-3", [[0], [0], [1], [1]]),
        ("0,2:0-1", [[0], [2]]),
        ("all:0", [[0, 1, 2, 3]]),
        ([[0, 1], 3], [[0, 1], [3]]),
        ("cpu:0-1", [[0], [1]]),
        ("cpu:all:0-1", [[0, 1], [2, 3]]),
    ],
)
def test_a_placement_gives_each_process_its_devices(placement: object, expected: list[list[int]]) -> None:
    assert ids(placement) == expected


def test_kinds_and_labels_select_devices_counted_among_themselves() -> None:
    devices = number(
        [Device(kind="cuda"), Device(kind="arm", labels=frozenset({"lab-a"})), Device(kind="arm", index=1)]
    )
    assert ids("arm:0-1", devices) == [[1], [2]]
    assert ids("lab-a:all", devices) == [[1]]
    assert ids("arm:all:0", devices) == [[1, 2]]


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("7", "no device 7; the cluster's devices: 0 \\(cpu:0 on node0\\)"),
        ("gpu:0", "kind or label 'gpu'"),
        ("arm", "cannot be read"),
        ("3-1", "runs backwards"),
        ("0-3:0-2", "do not divide"),
        ("0-1:0-2", "evenly"),
        ("0:1", "count from 0"),
        ("0-1:0,0", "count from 0"),
        ("0-1:0,2-3:1", "cannot be read"),
        ("cpu:9", "there are 4 devices"),
        ([], "names no device"),
    ],
)
def test_a_wrong_placement_says_what_is_wrong(placement: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        ids(placement)


def test_a_process_cannot_hold_devices_of_two_nodes() -> None:
    devices = number([Device(kind="cpu", node_id="a"), Device(kind="cpu", node_id="b")])
    with pytest.raises(PlanError, match="is on a and b"):
        ids("0-1:0", devices)


def test_a_process_sees_only_its_own_gpus() -> None:
    held = [Device(kind="cuda", index=3), Device(kind="cuda", index=5)]
    assert visible_devices_env(held) == {"CUDA_VISIBLE_DEVICES": "3,5"}
    assert torch_device(held) == "cuda:0"
    assert visible_devices_env([Device(kind="cpu")]) == {"CUDA_VISIBLE_DEVICES": ""}
    assert torch_device([Device(kind="cpu")]) == "cpu"


def test_devices_are_found_by_kind_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert [device.index for device in local_devices("auto")] == [2, 3]
    assert [device.kind for device in local_devices("cuda:1,cpu:2")] == ["cuda", "cpu", "cpu"]
    with pytest.raises(PlanError, match="3 devices of kind 'cuda' asked for, this machine shows 2"):
        local_devices("cuda:3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [device.kind for device in local_devices(2)] == ["cpu", "cpu"]

"""Weights between two processes of one GPU."""

from __future__ import annotations

import itertools
import multiprocessing
from typing import Any

import pytest
import torch

from rill.errors import UnsupportedError, WeightSyncError
from rill.weights.base import open_publisher, open_receiver
from tests.weights.scene import publish, pulled, same, transport, weights
from tests.weights.test_faults import FAULTS, break_from, of_equal_sizes


def test_a_machine_without_a_gpu_is_told_what_to_use() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(UnsupportedError, match="shm"):
        open_publisher(transport("cuda_ipc"))


def _receive(config: Any, pipe: Any) -> None:
    receiver = open_receiver(config)
    while (manifest := pipe.recv()) is not None:
        try:
            tensors = pulled(receiver, manifest)
            pipe.send({name: tensor.cpu() for name, tensor in tensors.items()})
        except Exception as error:
            pipe.send(repr(error))
    receiver.close()


def _receive_damaged(pipe: Any) -> None:
    """Takes what a config and a fault (of version 2) are to be tried on; says what became of every manifest."""
    while (given := pipe.recv()) is not None:
        config, fault = given
        receiver = open_receiver(config)
        mend = break_from(receiver, fault, 2)
        while (manifest := pipe.recv()) is not None:
            try:
                pulled(receiver, manifest)
                pipe.send("taken")
            except WeightSyncError as error:
                mend()
                pipe.send(str(error))
        receiver.close()


@pytest.mark.gpu
def test_every_fault_is_caught_on_the_gpu_and_the_next_version_arrives() -> None:
    """One process for all of them: each would spend seconds on its first touch of the device."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_receive_damaged, args=(there,), daemon=True)
    process.start()
    try:
        for verify, fault in itertools.product(("full", "sampled"), FAULTS):
            config = transport("cuda_ipc", verify=verify, bucket_bytes=64)
            here.send((config, fault))
            publisher = open_publisher(config)
            answers = []
            for version in (1, 2, 3):
                sent = {name: tensor.cuda() for name, tensor in of_equal_sizes(version).items()}
                here.send(publish(publisher, sent, version))
                assert here.poll(120)
                answers.append(here.recv())
            here.send(None)
            publisher.close()
            assert answers[0] == answers[2] == "taken" and "version 2" in answers[1], (verify, fault)
    finally:
        here.send(None)
        process.join(timeout=60)


@pytest.mark.gpu
def test_every_version_arrives_and_a_stale_manifest_is_refused() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    config = transport("cuda_ipc")
    process = context.Process(target=_receive, args=(config, there), daemon=True)
    process.start()
    publisher = open_publisher(config)
    try:
        manifests = []
        for version in (1, 2, 3, 4):
            sent = weights(version, dtype=torch.bfloat16)
            manifests.append(publish(publisher, {n: t.cuda() for n, t in sent.items()}, version))
            here.send(manifests[-1])
            assert here.poll(120)
            assert same(here.recv(), sent)
        publish(publisher, {n: t.cuda() for n, t in weights(5).items()}, 5)
        late = publish(publisher, {n: t.cuda() for n, t in weights(6).items()}, 6)
        publish(publisher, {n: t.cuda() for n, t in weights(7).items()}, 7)
        publish(publisher, {n: t.cuda() for n, t in weights(8).items()}, 8)
        here.send(late)
        assert here.poll(120) and "newer weights" in here.recv()
    finally:
        here.send(None)
        process.join(timeout=60)
        publisher.close()

"""What every transport guarantees; what broken ones do is in test_faults.py."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from rill.errors import ConfigError, UnsupportedError, WeightSyncError
from rill.runtime.cluster import Cluster
from rill.runtime.process.session import is_shm_usable
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer.tcp import ByteServer
from rill.runtime.worker import Worker
from rill.types import PolicyVersion
from rill.weights.base import Receiver, open_publisher, open_receiver, seated
from rill.weights.buckets import is_finite
from rill.weights.manifest import BucketSpec, WeightManifest
from rill.weights.shm import ShmReceiver
from tests.child import environment
from tests.runtime.leftovers import becomes_true
from tests.weights.scene import ends, publish, pulled, same, transport, weights

LOCAL = ["shm", "disk", "tcp"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOCAL)
def test_every_tensor_arrives_as_it_was_for_many_versions(name: str, dtype: torch.dtype) -> None:
    with ends(name) as (publisher, receiver):
        for version in (0, 1, 2, 5):
            sent = weights(version, dtype=dtype)
            manifest = pickle.loads(pickle.dumps(publish(publisher, sent, version)))
            assert same(pulled(receiver, manifest), sent)
            assert receiver.version == version
            assert len(manifest.buckets) > 2


@pytest.mark.parametrize("name", LOCAL)
def test_the_trainer_may_change_its_weights_right_after_publishing(name: str) -> None:
    with ends(name) as (publisher, receiver):
        sent = weights(1)
        kept = {k: v.clone() for k, v in sent.items()}
        manifest = publish(publisher, sent, 1)
        for tensor in sent.values():
            tensor.zero_()
        assert same(pulled(receiver, manifest), kept)


@pytest.mark.parametrize("name", LOCAL)
def test_versions_only_grow_on_both_sides(name: str) -> None:
    with ends(name) as (publisher, receiver):
        manifest = publish(publisher, weights(1), 3)
        pulled(receiver, manifest)
        with pytest.raises(WeightSyncError, match="only grow"):
            publish(publisher, weights(2), 3)
        with pytest.raises(WeightSyncError, match="holds 3"):
            pulled(receiver, manifest)


@pytest.mark.parametrize("name", LOCAL)
def test_a_pull_that_is_not_finished_does_not_change_the_version(name: str) -> None:
    with ends(name) as (publisher, receiver):
        manifest = publish(publisher, weights(1), 1)
        stream = receiver.pull(manifest)
        next(stream)
        stream.close()
        assert receiver.version is None
        pulled(receiver, manifest)
        assert receiver.version == 1


@pytest.mark.parametrize("name", LOCAL)
def test_a_flipped_bit_is_caught(name: str) -> None:
    rng = random.Random(0)
    with ends(name) as (publisher, receiver):
        for version in range(1, 20):
            manifest = publish(publisher, weights(version), version)
            target = rng.randrange(len(manifest.buckets))

            def flip(buffers: list[Tensor], target: int = target) -> list[Tensor]:
                buffers[target][rng.randrange(buffers[target].numel())] ^= 1 << rng.randrange(8)
                return buffers

            with faulty(receiver, flip), pytest.raises(WeightSyncError, match=f"bucket {target} of"):
                pulled(receiver, manifest)
            assert receiver.version is None


@pytest.mark.parametrize("kind", ["tcp", "distributed"])
def test_a_taken_port_is_the_users_to_mend(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = {"port": port} if kind == "tcp" else {"address": f"127.0.0.1:{port}"}
        end = seated(transport(kind, timeout_s=5.0, **place), rank=0, num_receivers=1)
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} .*in use.*sync.transport"):
            open_publisher(end)


def listening() -> set[tuple[str, int]]:
    """Where this process does."""
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_weights_are_served_on_the_one_address_that_other_machines_reach() -> None:
    before = listening()  # other tests' servers may have a port of the same number elsewhere
    others = open_publisher(transport("tcp"), host="127.0.0.2")
    chosen = open_publisher(transport("tcp", host="127.0.0.3"), host="127.0.0.2")
    try:
        for publisher, host in ((others, "127.0.0.2"), (chosen, "127.0.0.3")):
            location = publish(publisher, weights(1), 1).location
            port = int(location.removeprefix(f"tcp://{host}:"))
            assert {ip for ip, at in listening() - before if at == port} == {host}
    finally:
        others.close()
        chosen.close()


def test_the_publishers_key_shows_nowhere_and_without_it_nothing_is_had() -> None:
    with ends("tcp", timeout_s=0.5) as (publisher, receiver):
        manifest = publish(publisher, weights(1), 1)
        stranger = replace(manifest, key=bytes(32))
        with pytest.raises(WeightSyncError) as caught:
            pulled(receiver, stranger)
        told = f"{manifest!r} {manifest} {caught.value} {caught.value.__cause__} {publisher.config!r}"
        assert manifest.key and manifest.key.hex() not in told and repr(manifest.key) not in told
        files = [path.read_bytes() for path in publisher.folder.rglob("*") if path.is_file()]
        assert not any(manifest.key in data or manifest.key.hex().encode() in data for data in files)
        assert same(pulled(receiver, manifest), weights(1))


def test_bytes_that_were_changed_with_their_checksum_are_not_taken() -> None:
    """Somebody between the two who rewrites weights and computes their checksum anew: he has no key."""
    with ends("tcp") as (publisher, receiver):
        manifest = publish(publisher, weights(1), 1)
        real, forged = publisher._server, SessionKey(b"", bytes(32))
        evil = ByteServer("127.0.0.1", forged, publisher._read)
        with pytest.raises(WeightSyncError, match="sent no part"):
            impatient = open_receiver(transport("tcp", timeout_s=0.5))
            pulled(impatient, replace(manifest, location=evil.endpoint))
        evil.close()
        assert real.endpoint == manifest.location and same(pulled(receiver, manifest), weights(1))


def test_auto_has_to_be_chosen_first() -> None:
    with pytest.raises(UnsupportedError, match="name one of: shm, cuda_ipc"):
        open_publisher(transport("auto"))


@pytest.mark.parametrize("name", LOCAL)
def test_a_manifest_without_a_bucket_is_caught(name: str) -> None:
    with ends(name) as (publisher, receiver):
        manifest = publish(publisher, weights(1), 1)
        with pytest.raises(WeightSyncError, match="missing or out of order"):
            pulled(receiver, replace(manifest, buckets=manifest.buckets[:1] + manifest.buckets[2:]))
        with pytest.raises(WeightSyncError, match="lies in no bucket"):
            pulled(receiver, replace(manifest, buckets=manifest.buckets[:-1]))


@pytest.mark.parametrize("name", LOCAL)
def test_a_name_twice_is_refused_at_the_source_and_in_a_manifest(name: str) -> None:
    with ends(name) as (publisher, receiver):
        pair = ("w", torch.zeros(3))
        with pytest.raises(WeightSyncError, match="twice"):
            publisher.publish([pair, pair], PolicyVersion(1))
        manifest = publish(publisher, weights(1), 2)
        with pytest.raises(WeightSyncError, match="more than once"):
            pulled(receiver, replace(manifest, tensors=(*manifest.tensors, manifest.tensors[0])))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_not_finite_are_refused_by_name(bad: float, dtype: torch.dtype) -> None:
    with ends("shm") as (publisher, _):
        sent = weights(1, dtype=dtype)
        sent["layers.4.weight"][3, 3] = bad
        with pytest.raises(WeightSyncError, match=r"layers\.4\.weight"):
            publish(publisher, sent, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_finite_check_agrees_with_torch_on_every_corner(dtype: torch.dtype) -> None:
    corners = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype
    )
    assert is_finite(corners) and is_finite(corners[1:2]) and is_finite(corners[3:4])
    assert is_finite(torch.tensor([torch.finfo(dtype).smallest_normal / 2], dtype=dtype))
    for bad in (float("nan"), float("inf"), float("-inf"), -float("nan")):
        for at in range(len(corners)):
            broken = corners.clone()
            broken[at] = bad
            assert not is_finite(broken)
            assert not is_finite(broken.repeat(2, 2).t())  # not contiguous


def test_a_file_cut_off_at_any_byte_is_caught(tmp_path: Path) -> None:
    with ends("disk", folder=str(tmp_path)) as (publisher, receiver):
        manifest = publish(publisher, weights(1), 1)
        file = sorted(publisher.folder.glob("v*/*.safetensors"))[1]
        whole = file.read_bytes()
        for length in [0, 1, 7, 8, 9, *range(20, len(whole), 97), len(whole) - 1]:
            file.write_bytes(whole[:length])
            with pytest.raises(WeightSyncError):
                pulled(receiver, manifest)
        file.write_bytes(whole)
        assert same(pulled(receiver, manifest), weights(1))


def test_a_version_on_disk_is_invisible_until_it_is_whole(tmp_path: Path) -> None:
    with ends("disk", folder=str(tmp_path)) as (publisher, _):

        def half():  # type: ignore[no-untyped-def]
            yield from list(weights(1).items())[:6]
            assert not list(publisher.folder.glob("v*"))
            raise RuntimeError("the trainer died")

        with pytest.raises(RuntimeError, match="died"):
            publisher.publish(half(), PolicyVersion(1))
        assert not list(publisher.folder.glob("v*"))
        publish(publisher, weights(1), 1)
        left = [path.name for path in publisher.folder.iterdir() if path.is_dir()]
        assert left == ["v0000000001"], "what was half-written is gone"


def test_a_publisher_that_was_killed_is_no_obstacle_to_the_next_one_in_its_folder(tmp_path: Path) -> None:
    """Which publishes again what was published after the last checkpoint."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, env=environment()
    )
    assert child.stdout is not None and child.stdout.readline() == b"published\n"
    with ends("disk", folder=str(tmp_path)) as (publisher, receiver):
        assert len(list(tmp_path.glob("*/*/v0000000001"))) == 1, "of a living one nothing is removed"
        child.kill()
        child.wait()
        assert same(pulled(receiver, publish(publisher, weights(1), 1)), weights(1))
    with ends("disk", folder=str(tmp_path)) as (publisher, receiver):
        assert list(publisher.folder.parent.iterdir()) == [publisher.folder]
        assert same(pulled(receiver, publish(publisher, weights(1), 1)), weights(1))
    assert list(publisher.folder.parent.iterdir()) == []


def test_a_folder_that_machines_share_is_swept_by_each_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's lock may not be seen here."""
    with ends("disk", folder=str(tmp_path)) as (publisher, receiver):
        manifest = publish(publisher, weights(1), 1)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("rill.weights.disk.socket.gethostname", lambda: "another")
            elsewhere.setattr("rill.runtime.process.session.SHM_ROOT", tmp_path / "shm")  # not this one's
            elsewhere.setattr("rill.runtime.process.session.fcntl.flock", lambda *_: None)
            with ends("disk", folder=str(tmp_path)):
                assert same(pulled(receiver, manifest), weights(1))


def test_who_may_read_a_chosen_folder_may_read_the_weights_in_it(tmp_path: Path) -> None:
    (place := tmp_path / "shared").mkdir()
    place.chmod(0o755)
    with ends("disk", folder=str(place)) as (publisher, _):
        publish(publisher, weights(1), 1)
        folders = [path for path in place.rglob("*") if path.is_dir()]
        assert len(folders) == 3 and all(path.stat().st_mode & 0o005 == 0o005 for path in folders)
    with ends("disk") as (publisher, _):
        assert publisher.folder.stat().st_mode & 0o077 == 0, "among temporary files nobody else's"


KILLED = """
import sys, time, torch
from rill.types import PolicyVersion
from rill.weights import open_publisher
from rill.weights.disk import DiskTransport
publisher = open_publisher(DiskTransport.Config(folder=sys.argv[1]))
publisher.publish([("a", torch.ones(4))], PolicyVersion(1))
print("published", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", LOCAL)
def test_a_publish_that_failed_can_be_tried_again(name: str) -> None:
    with ends(name) as (publisher, receiver):
        pulled(receiver, publish(publisher, weights(1), 1))
        broken = weights(2)
        broken["layers.8.weight"][0, 0] = float("nan")
        with pytest.raises(WeightSyncError, match="not finite"):
            publish(publisher, broken, 2)
        assert same(pulled(receiver, publish(publisher, weights(2), 2)), weights(2))


def test_a_shared_memory_reader_that_is_overtaken_learns_of_it() -> None:
    with ends("shm") as (publisher, receiver):
        stream = receiver.pull(publish(publisher, weights(1), 1))
        next(stream)
        publish(publisher, weights(2), 2)
        next(stream)  # the other slot was written: version 1 is still there
        publish(publisher, weights(3), 3)
        with pytest.raises(WeightSyncError, match="newer weights"):
            list(stream)


def test_shared_memory_is_given_back_on_close_though_a_receiver_has_it_mapped() -> None:
    with ends("shm") as (publisher, receiver):
        manifest = publish(publisher, weights(1), 1)
        pulled(receiver, manifest)
        fd = os.open(Path(manifest.location) / manifest.buckets[0].source, os.O_RDONLY)
        assert os.fstat(fd).st_blocks > 0
        publisher.close()
        assert not Path(manifest.location).exists()
        assert os.fstat(fd).st_nlink == 0
        if is_shm_usable():
            assert os.fstat(fd).st_blocks == 0
        os.close(fd)


def test_shared_memory_follows_the_size_of_the_weights() -> None:
    with ends("shm") as (publisher, receiver):
        for version in (1, 2):
            publish(publisher, weights(version), version)
        few = {"w": torch.ones(3)}
        for version in (3, 4):
            manifest = publish(publisher, few, version)
        assert same(pulled(receiver, manifest), few)
        assert len(list(Path(manifest.location).glob("?-*"))) == 2, "one bucket in each slot"


def test_a_receiver_keeps_nothing_of_a_publisher_when_another_has_taken_its_place() -> None:
    with ends("shm") as (first, receiver):
        pulled(receiver, publish(first, weights(1), 1))
        pulled(receiver, publish(first, weights(2), 2))
        assert isinstance(receiver, ShmReceiver)
        before = list(receiver._mapped._kept.values())
        with ends("shm") as (second, _):
            manifest = publish(second, weights(3), 3)
            pulled(receiver, manifest)
            kept = list(receiver._mapped._kept.values())
            assert len(kept) == len(manifest.buckets) and not set(map(id, before)) & set(map(id, kept))


class Trainer(Worker):
    def __init__(self) -> None:
        self.publisher = open_publisher(transport("shm"))

    def publish(self, version: int) -> WeightManifest:
        return publish(self.publisher, weights(version), version)


class Engine(Worker):
    def __init__(self) -> None:
        self.receiver = open_receiver(transport("shm"))

    def pull(self, manifest: WeightManifest) -> int:
        assert same(pulled(self.receiver, manifest), weights(int(manifest.version)))
        return self.num_mapped()

    def num_mapped(self) -> int:
        assert isinstance(self.receiver, ShmReceiver)
        return len(self.receiver._mapped)


@pytest.mark.timeout(90)
def test_a_dead_trainers_weights_are_not_kept_mapped() -> None:
    with Cluster(devices="cpu:2", preload=["torch"]) as cluster:
        trainer = Trainer.launch_async(cluster, name="trainer", placement="0", threads=1)
        engine = Engine.launch_async(cluster, name="engine", placement="1", threads=1)
        (manifest,) = trainer.publish(1).wait(60)
        assert Path(manifest.location).parent == cluster.session.shm_dir, "it goes with the session"
        assert engine.pull(manifest).wait(60) == [len(manifest.buckets)]
        os.kill(trainer.addresses()[0].pid, signal.SIGKILL)
        assert becomes_true(lambda: engine.num_mapped().wait(20) == [0])
        trainer.relaunch(0)
        (manifest,) = trainer.publish(2).wait(60)
        assert engine.pull(manifest).wait(60) == [len(manifest.buckets)]


def test_a_manifest_of_another_transport_is_refused() -> None:
    with ends("shm") as (publisher, _), ends("disk") as (_, receiver):
        with pytest.raises(WeightSyncError, match="same transport"):
            pulled(receiver, publish(publisher, weights(1), 1))


@contextmanager
def faulty(receiver: Receiver, fault: Callable[[list[Tensor]], list[Tensor]]) -> Iterator[None]:
    """A fault between the transport and the verification: it may change, swap or replace the bytes of buckets."""
    real = receiver.buckets

    def broken(manifest: WeightManifest) -> Iterator[tuple[BucketSpec, Tensor]]:
        pairs = list(real(manifest))
        yield from zip([b for b, _ in pairs], fault([data.clone() for _, data in pairs]), strict=True)

    receiver.buckets = broken  # type: ignore[method-assign]
    yield
    receiver.buckets = real  # type: ignore[method-assign]

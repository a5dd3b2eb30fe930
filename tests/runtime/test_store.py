"""The payload store: memory, its reuse, its end, and other nodes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from rill.errors import PeerDiedError, RunError, StuckError
from rill.runtime.context import RuntimeContext, Site, WorkerAddress
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer import store as store_module
from rill.runtime.transfer.segments import LARGEST_SLAB_SLOT, slot_size, unlink
from rill.runtime.transfer.store import Store
from rill.runtime.transfer.store_server import StoreServer
from rill.runtime.transfer.wire import encode
from tests.runtime.hub_fakes import HubProcess, hub_process

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def producer(tmp_path: Path) -> Store:
    return Store(tmp_path, "n0", "p[0]#0")


@pytest.fixture
def consumer(tmp_path: Path) -> Store:
    return Store(tmp_path, "n0", "c[0]#0")


def test_an_object_comes_out_as_it_went_in(producer: Store, consumer: Store) -> None:
    original = {
        "a": np.arange(100_000, dtype=np.int64).reshape(100, 1000),
        "t": torch.arange(70_000, dtype=torch.bfloat16),
        "ragged": [torch.ones(n) for n in (1, 5000, 0)],
        "text": "x" * 10_000,
    }
    read = consumer.read(producer.write(encode(original)), lambda: None)
    assert np.array_equal(read["a"], original["a"])
    assert torch.equal(read["t"], original["t"])
    assert [len(t) for t in read["ragged"]] == [1, 5000, 0]
    assert read["text"] == original["text"]


def test_reading_copies_nothing(producer: Store, consumer: Store) -> None:
    ref = producer.write(encode(np.zeros(1_000_000, dtype=np.uint8)))
    one, other = consumer.read(ref, lambda: None), consumer.read(ref, lambda: None)
    one[17] = 5
    assert other[17] == 5


def test_memory_is_released_when_the_last_view_is_gone(producer: Store, consumer: Store) -> None:
    released: list[int] = []
    array = consumer.read(producer.write(encode({"x": np.ones(50_000)})), lambda: released.append(1))["x"]
    part = array[10:20]
    tensor = torch.from_numpy(part)
    del array, part
    gc.collect()
    assert released == []
    del tensor
    gc.collect()
    assert released == [1]


def test_a_payload_without_views_is_released_at_once(producer: Store, consumer: Store) -> None:
    released: list[int] = []
    text = consumer.read(producer.write(encode("y" * 20_000)), lambda: released.append(1))
    assert text[0] == "y" and released == [1]


def test_freed_slots_are_used_again(producer: Store) -> None:
    payload = encode(np.zeros(3_000_000, dtype=np.uint8))
    first = producer.write(payload)
    producer.free([(first[2], first[3])])
    second = producer.write(payload)
    assert (second[2], second[3]) == (first[2], first[3])
    assert producer.stats()["num_segments"] == 1


def test_small_payloads_share_a_segment_without_touching(producer: Store, consumer: Store) -> None:
    refs = [producer.write(encode(np.full(6000, n, dtype=np.uint8))) for n in range(40)]
    assert producer.stats()["num_segments"] == 1
    assert all((consumer.read(ref, lambda: None) == n).all() for n, ref in enumerate(refs))


def test_the_pool_does_not_grow_for_ever(
    producer: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "POOL_BYTES", 10_000_000)
    refs = [producer.write(encode(np.zeros(2_000_000, dtype=np.uint8))) for _ in range(20)]
    producer.free([(ref[2], ref[3]) for ref in refs])
    assert producer.stats()["free_bytes"] <= 10_000_000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000_000


def test_the_pool_keeps_a_few_of_the_largest_payloads_and_not_of_huge_ones(
    producer: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "POOL_BYTES", 1_000_000)
    monkeypatch.setattr(store_module, "_LARGEST_POOL_BYTES", 25_000_000)
    for num_bytes in (5_000_000, 20_000_000):
        refs = [producer.write(encode(np.zeros(num_bytes, dtype=np.uint8))) for _ in range(6)]
        producer.free([(ref[2], ref[3]) for ref in refs])
        assert 20_000_000 <= producer.stats()["free_bytes"] <= 25_000_000


def test_full_shared_memory_says_what_to_do(producer: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StuckError, match="capacity"):
        producer.write(encode(np.zeros(10_000)), timeout_s=0.05)


def test_a_payload_that_is_gone_is_named(producer: Store, consumer: Store, tmp_path: Path) -> None:
    ref = producer.write(encode(np.zeros(10_000)))
    (tmp_path / ref[2]).unlink()
    with pytest.raises(PeerDiedError, match=r"p\[0\]#0\.0"):
        consumer.read(ref, lambda: None)


def test_a_dead_owners_files_go_except_those_still_needed(tmp_path: Path) -> None:
    for name in ("p[1]#0.0", "p[1]#0.1", "p[11]#0.0"):
        (tmp_path / name).touch()
    unlink(tmp_path, ["p[1]#0", ["p[1]#0.1"]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p[11]#0.0", "p[1]#0.1"]
    unlink(tmp_path, "p[1]#0.1")
    assert [path.name for path in tmp_path.iterdir()] == ["p[11]#0.0"]


@given(st.integers(1, 1 << 34))
def test_a_size_class_fits_and_wastes_little(num_bytes: int) -> None:
    size = slot_size(num_bytes)
    assert num_bytes <= size and size % 4096 == 0
    assert size <= max(8192, num_bytes * 1.26 + 4096)
    assert slot_size(size) == size or size <= LARGEST_SLAB_SLOT


KEY = SessionKey.new()


def context_of(hub: HubProcess, shm_dir: Path, node_id: str, group: str) -> RuntimeContext:
    """A process of another node, as far as the store can tell."""
    shm_dir.mkdir(exist_ok=True)
    site = Site(
        session_id="s",
        session_dir=hub.session_dir,
        shm_dir=shm_dir,
        node_id=node_id,
        hub_endpoint=hub.endpoint,
        key=KEY,
    )
    return RuntimeContext(
        site,
        WorkerAddress(group, 0, node_id, os.getpid(), ""),
        mailbox=None,  # type: ignore[arg-type]
        calls=None,  # type: ignore[arg-type]
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with hub_process(tmp_path) as process:
        yield process


def test_a_payload_of_another_node_comes_over_tcp_in_chunks(hub: HubProcess, tmp_path: Path) -> None:
    there = context_of(hub, tmp_path / "there", "n1", "producer")
    here = context_of(hub, tmp_path / "here", "n0", "consumer")
    server = StoreServer(there)
    released: list[int] = []
    original = {"x": np.random.default_rng(0).integers(0, 255, 11_000_000, dtype=np.uint8), "y": "z" * 9000}
    read = here.store.read(there.store.write(encode(original)), lambda: released.append(1))
    assert np.array_equal(read["x"], original["x"]) and read["y"] == original["y"]
    assert released == [1]  # the copy is ours: the other node's memory is free
    server.close()
    here.close()
    there.close()


def test_the_store_server_does_not_answer_strangers(hub: HubProcess, tmp_path: Path) -> None:
    there = context_of(hub, tmp_path / "there", "n1", "producer")
    ref = there.store.write(encode({"x": np.ones(1000)}))
    server = StoreServer(there)
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(server.endpoint)
    request = msgspec.msgpack.encode((ref[2], ref[3], 100, 0, b"n" * 16))
    for frames in ([request], [request, SessionKey.new().mac(request)], [request, b""]):
        stranger.send_multipart(frames)
    assert not stranger.poll(300)
    stranger.send_multipart([request, KEY.mac(request)])
    assert stranger.poll(5000), "the same request with the key is answered"
    stranger.close(linger=0)
    server.close()
    there.close()


def test_an_answer_that_another_made_is_not_unpickled(hub: HubProcess, tmp_path: Path) -> None:
    here = context_of(hub, tmp_path / "here", "n0", "consumer")
    there = context_of(hub, tmp_path / "there", "n1", "producer")
    # It stands for somebody who answers in the place of a store server.
    there.site = replace(there.site, key=SessionKey.new())
    ref = there.store.write(encode({"x": np.ones(1000)}))
    server = zmq.Context.instance().socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    there.hub.call("registry", "publish", ["store/n1", f"tcp://127.0.0.1:{port}", True], 10.0)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            here.store.read(ref, lambda: None)
        except RunError as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    identity, raw, _code = server.recv_multipart()
    assert there.key is not None
    chunk = bytes(4096)
    server.send_multipart([identity, b"1", there.key.mac(raw, b"1", chunk[: ref[4]]), chunk])
    reader.join(timeout=10)
    assert len(failures) == 1 and "not sent by n1" in str(failures[0])
    server.close(linger=0)
    here.close()
    there.close()

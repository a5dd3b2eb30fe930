"""The payload store: memory, its reuse, its end, and other nodes."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rill.errors import PeerDiedError, RunError, StuckError
from rill.runtime.address import Site, WorkerAddress
from rill.runtime.context import RuntimeContext
from rill.runtime.process.scratch import ScratchFolder
from rill.runtime.process.session import SHM_ROOT, is_shm_usable
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer import store as store_module
from rill.runtime.transfer.segments import LARGEST_SLAB_SLOT, Ref, slot_size, unlink
from rill.runtime.transfer.store import Store, serve_store
from rill.runtime.transfer.wire import Encoded, encode
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
    producer.free([first.slot])
    second = producer.write(payload)
    assert second.slot == first.slot
    assert len(producer._own) == 1


def test_small_payloads_share_a_segment_without_touching(producer: Store, consumer: Store) -> None:
    refs = [producer.write(encode(np.full(6000, n, dtype=np.uint8))) for n in range(40)]
    assert len(producer._own) == 1
    assert all((consumer.read(ref, lambda: None) == n).all() for n, ref in enumerate(refs))


def test_the_pool_does_not_grow_for_ever(
    producer: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "POOL_BYTES", 10_000_000)
    refs = [producer.write(encode(np.zeros(2_000_000, dtype=np.uint8))) for _ in range(20)]
    producer.free([ref.slot for ref in refs])
    assert producer._free_bytes <= 10_000_000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000_000


def test_the_pool_keeps_a_few_of_the_largest_payloads_and_not_of_huge_ones(
    producer: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "POOL_BYTES", 1_000_000)
    monkeypatch.setattr(store_module, "_LARGEST_POOL_BYTES", 25_000_000)
    for num_bytes in (5_000_000, 20_000_000):
        refs = [producer.write(encode(np.zeros(num_bytes, dtype=np.uint8))) for _ in range(6)]
        producer.free([ref.slot for ref in refs])
        assert 20_000_000 <= producer._free_bytes <= 25_000_000


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Shared memory of 8 MiB: two slabs, or one slab and one large payload."""
    capacity = 8 * 1024 * 1024

    def reserve(fd: int, offset: int, num_bytes: int) -> None:
        if sum(path.stat().st_size for path in tmp_path.iterdir()) + num_bytes > capacity:
            raise OSError(28, "No space left on device")
        os.ftruncate(fd, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=capacity))
    return capacity


def megabytes(count: int) -> Encoded:
    return encode(np.zeros(count * 1024 * 1024, dtype=np.uint8))


def test_full_shared_memory_says_what_to_do_though_a_slab_has_free_slots(producer: Store, small: int) -> None:
    producer.write(
        encode(np.zeros(10_000))
    )  # its slab has free slots, which are of no use to a large payload
    producer.write(megabytes(3))
    with pytest.raises(StuckError, match="capacity"):
        producer.write(megabytes(3), timeout_s=0.3)


def test_a_writer_that_waits_for_memory_holds_nobody_up(producer: Store, small: int) -> None:
    first = producer.write(megabytes(6))
    written: list[Ref] = []
    writer = threading.Thread(target=lambda: written.append(producer.write(megabytes(5), timeout_s=30)))
    writer.start()
    time.sleep(0.3)
    assert not written and len(producer._own) == 1  # the lock is free
    producer.free([first.slot])
    writer.join(timeout=20)
    assert len(written) == 1 and len(producer._own) == 1


def test_memory_that_another_process_frees_is_found(producer: Store, small: int, tmp_path: Path) -> None:
    other = tmp_path / "other[0]#0.0"
    other.write_bytes(bytes(6 * 1024 * 1024))
    threading.Timer(0.3, other.unlink).start()
    producer.write(megabytes(5), timeout_s=30)


def test_empty_slabs_make_room_for_a_large_payload(producer: Store, small: int) -> None:
    refs = [producer.write(encode(np.zeros(1000 * n))) for n in (10, 90)]  # two classes: two slabs
    producer.free([ref.slot for ref in refs])
    producer.write(megabytes(6), timeout_s=5)
    assert producer._free_bytes == 0


def test_a_payload_that_can_never_fit_is_refused_at_once(producer: Store, small: int) -> None:
    with pytest.raises(RunError, match="can never fit into shared memory, which has 8388608"):
        producer.write(megabytes(9), timeout_s=600)


def test_what_an_owner_gives_up_is_gone_though_a_consumer_has_it_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_shm_usable():
        pytest.skip("this machine has no shared memory")
    monkeypatch.setattr(store_module, "POOL_BYTES", 0)
    monkeypatch.setattr(store_module, "_ROTATION", 0)
    with ScratchFolder("test", SHM_ROOT) as folder:
        producer, consumer = Store(folder.path, "n0", "p[0]#0"), Store(folder.path, "n0", "c[0]#0")
        ref = producer.write(megabytes(4))
        consumer.read(ref, lambda: None)
        fd = os.open(folder.path / ref.segment, os.O_RDONLY)
        assert os.fstat(fd).st_blocks * 512 >= 4 * 1024 * 1024
        producer.free([ref.slot])
        assert os.fstat(fd).st_nlink == 0 and os.fstat(fd).st_blocks == 0
        os.close(fd)


def test_a_dead_owners_memory_is_not_kept_mapped(producer: Store, consumer: Store) -> None:
    first, second = producer.write(megabytes(2)), producer.write(encode(np.full(300_000, 7)))
    kept = consumer.read(second, lambda: None)
    consumer.read(first, lambda: None)
    assert consumer._mapped
    consumer.owner_died("p[0]#0")
    assert not consumer._mapped
    assert int(kept.sum()) == 2_100_000  # what is looked at stays
    assert consumer.read(first, lambda: None).size == 2 * 1024 * 1024  # its payloads may outlive it
    assert not consumer._mapped


def test_a_payload_that_is_gone_is_named(producer: Store, consumer: Store, tmp_path: Path) -> None:
    ref = producer.write(encode(np.zeros(10_000)))
    (tmp_path / ref.segment).unlink()
    with pytest.raises(PeerDiedError, match=r"p\[0\]#0\.0"):
        consumer.read(ref, lambda: None)


def test_a_dead_owners_files_go_except_those_still_needed(tmp_path: Path) -> None:
    for name in ("p[1]#0.0", "p[1]#0.1", "p[11]#0.0"):
        (tmp_path / name).touch()
    unlink(tmp_path, "p[1]#0", ["p[1]#0.1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p[11]#0.0", "p[1]#0.1"]
    unlink(tmp_path, "p[1]#0", [])
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
        session_dir=hub.site.session_dir,
        shm_dir=shm_dir,
        node_id=node_id,
        hub_endpoint=hub.endpoint,
        key=KEY,
    )
    return RuntimeContext(site, WorkerAddress(group, 0, node_id))


@contextmanager
def store_server(context: RuntimeContext, launch: int) -> Iterator[None]:
    """The store server of a context's node."""
    server, client = serve_store(context.site, launch)
    yield
    server.close()
    client.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with hub_process(tmp_path) as process:
        yield process


def test_a_payload_of_another_node_comes_over_tcp_in_chunks(hub: HubProcess, tmp_path: Path) -> None:
    there = context_of(hub, tmp_path / "there", "n1", "producer")
    here = context_of(hub, tmp_path / "here", "n0", "consumer")
    released: list[int] = []
    original = {"x": np.random.default_rng(0).integers(0, 255, 11_000_000, dtype=np.uint8), "y": "z" * 9000}
    with store_server(there, 1):
        read = here.store.read(there.store.write(encode(original)), lambda: released.append(1))
    assert np.array_equal(read["x"], original["x"]) and read["y"] == original["y"]
    assert released == [1]  # the copy is ours: the other node's memory is free
    here.close()
    there.close()


@pytest.mark.slow
def test_a_store_server_that_was_killed_is_found_again_at_its_new_address(
    hub: HubProcess, tmp_path: Path
) -> None:
    there = context_of(hub, tmp_path / "there", "n1", "producer")
    here = context_of(hub, tmp_path / "here", "n0", "consumer")
    ref = there.store.write(megabytes(11))
    with store_server(there, 1):
        assert here.store.read(ref, lambda: None).size == 11 * 1024 * 1024
    released: list[int] = []
    reading = ThreadPoolExecutor(1).submit(lambda: here.store.read(ref, lambda: released.append(1)))
    time.sleep(1.5)
    assert not reading.done() and not released
    with store_server(there, 2):
        assert reading.result(20).size == 11 * 1024 * 1024 and released == [1]
    here.close()
    there.close()

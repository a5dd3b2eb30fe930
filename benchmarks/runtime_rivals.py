"""Rivals and limits of runtime_channel.py: Ray's queue actor and object store, multiprocessing, pyzmq, plain copies."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue as ProcessQueue
from typing import Any

import numpy as np

from benchmarks.runtime_calls import report
from rill.runtime.process.session_key import SessionKey

SMALL = {"prompt_id": "gsm8k/17", "reward": 1.0}
LARGE_BYTES = 16 * 1024 * 1024
TCP_ARRAYS = "16 MB arrays between nodes"


def ray(num_small: int, num_large: int) -> None:
    import ray
    from ray.util.queue import Queue

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)

    @ray.remote
    class End:
        def put_small(self, queue: Any, count: int) -> float:
            started_s = time.time()
            for _ in range(count):
                queue.put(SMALL)
            return started_s

        def take_small(self, queue: Any, count: int) -> float:
            for _ in range(count):
                queue.get()
            return time.time()

        def __init__(self) -> None:
            self.array = np.ones(LARGE_BYTES // 8)

        def make(self) -> Any:
            return self.array

        def look(self, array: Any) -> float:
            return float(array[-1])

    actor: Any = End
    producer, consumer, queue = actor.remote(), actor.remote(), Queue()
    for count in (50, max(200, num_small // 100)):
        taking = consumer.take_small.remote(queue, count)
        started_s = ray.get(producer.put_small.remote(queue, count))
        seconds = ray.get(taking) - started_s
    report("small items, 1 to 1", "ray queue actor", count / seconds, "items/s")
    ray.get(consumer.look.remote(producer.make.remote()))
    started_s = time.perf_counter()
    looking: list[Any] = []
    for _ in range(num_large):  # four in flight, as the channel's capacity
        looking.append(consumer.look.remote(producer.make.remote()))
        if len(looking) == 4:
            ray.get(looking.pop(0))
    ray.get(looking)
    seconds = time.perf_counter() - started_s
    report("16 MB arrays", "ray object store", num_large * LARGE_BYTES / seconds / 1e9, "GB/s")
    ray.shutdown()


def multiprocessing_queue(num_small: int, num_large: int) -> None:
    context = multiprocessing.get_context("spawn")
    for name, payload, count, unit, scale in (
        ("small items, 1 to 1", SMALL, num_small, "items/s", 1.0),
        ("16 MB arrays", np.ones(LARGE_BYTES // 8), num_large, "GB/s", LARGE_BYTES / 1e9),
    ):
        queue = context.Queue()
        process = context.Process(target=_feed, args=(queue, payload, count))
        process.start()
        queue.get()
        started_s = time.perf_counter()
        for _ in range(count - 1):
            queue.get()
        report(name, "multiprocessing.Queue", scale * (count - 1) / (time.perf_counter() - started_s), unit)
        process.join()


def _feed(queue: ProcessQueue[Any], payload: Any, count: int) -> None:
    for _ in range(count):
        queue.put(payload)


def zmq_messages(num_small: int, num_large: int) -> None:
    """Raw messages; over TCP in the clear and under CURVE, in chunks as between nodes."""
    with tempfile.TemporaryDirectory() as folder:
        ipc, chunk_bytes = f"ipc://{folder}/s", 4 * 1024 * 1024
        num_chunks = num_large * LARGE_BYTES // chunk_bytes // 4
        rate = _zmq_rate(ipc, 64, num_small, None)
        report("small items, 1 to 1", "pyzmq ipc (limit)", rate, "items/s")
        rate = _zmq_rate(ipc, LARGE_BYTES, num_large, None) * LARGE_BYTES / 1e9
        report("16 MB arrays", "pyzmq ipc (limit)", rate, "GB/s")
        for name, key in (("in the clear", None), ("under CURVE", SessionKey.new())):
            rate = _zmq_rate("tcp://127.0.0.1:*", chunk_bytes, num_chunks, key) * chunk_bytes / 1e9
            report(TCP_ARRAYS, f"pyzmq TCP, {name} (limit)", rate, "GB/s")


def _zmq_rate(endpoint: str, num_bytes: int, count: int, key: SessionKey | None) -> float:
    import zmq

    socket: Any = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 4 if num_bytes > 1024 else 10_000)
    if key is not None:
        key.guard(socket)
    socket.bind(endpoint)
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    process = multiprocessing.get_context("spawn").Process(target=_push, args=(bound, num_bytes, count, key))
    process.start()
    socket.recv()
    started_s = time.perf_counter()
    for _ in range(count - 1):
        socket.recv(copy=False)
    rate = (count - 1) / (time.perf_counter() - started_s)
    process.join()
    socket.close()
    return rate


def _push(endpoint: str, num_bytes: int, count: int, key: SessionKey | None) -> None:
    import zmq

    socket: Any = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 4 if num_bytes > 1024 else 10_000)
    if key is not None:
        key.present(socket)
    socket.connect(endpoint)
    payload = bytes(num_bytes)
    for _ in range(count):
        socket.send(payload, copy=num_bytes < 1024)
    socket.close()
    zmq.Context.instance().term()


@contextmanager
def _shared_memory(num_bytes: int) -> Iterator[mmap.mmap]:
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(num_bytes)
        with mmap.mmap(file.fileno(), num_bytes) as memory:
            memory[:] = bytes(num_bytes)
            yield memory


def copy_rates(count: int) -> tuple[float, float]:
    """Gigabytes a second into warm shared memory, and in and out again: what a payload must at least cost."""
    source, target = np.ones(LARGE_BYTES, np.uint8), np.zeros(LARGE_BYTES, np.uint8)
    rates = []
    with _shared_memory(LARGE_BYTES) as memory:
        shared = np.frombuffer(memory, np.uint8)
        for both in (False, True):
            started_s = time.perf_counter()
            for _ in range(count):
                np.copyto(shared, source)
                if both:
                    np.copyto(target, shared)
            rates.append(count * LARGE_BYTES / (time.perf_counter() - started_s) / 1e9)
        del shared
    return rates[0], rates[1]


RIVALS: dict[str, Callable[[int, int], None]] = {
    "ray": ray,
    "multiprocessing": multiprocessing_queue,
    "zmq": zmq_messages,
}

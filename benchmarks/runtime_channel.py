"""Channels: small items per second, bytes per second of large tensors, latency, and what the broker itself moves.

    python benchmarks/runtime_channel.py [--quick] [--rivals ray,multiprocessing,zmq,shm]

Prints one JSON line per measurement: {"name", "system", "value", "unit"}, then the ratios. All in one run, one machine:

- rivals: Ray's queue actor and object store, multiprocessing.Queue; left out when not installed;
- physical limits: raw pyzmq ipc messages, and copies into and out of recycled shared memory in one process.

Claims: small items >= 20 x a queue actor on Ray; 16 producers and 16 consumers hold the rate of one pair; 16 MB tensors
>= 60 % of the shared-memory copy rate; the broker's traffic per item does not grow with the payload.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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

from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.worker import Worker

SMALL = {"prompt_id": "gsm8k/17", "reward": 1.0}
LARGE_BYTES = 16 * 1024 * 1024
_results: dict[tuple[str, str], float] = {}


def report(name: str, system: str, value: float, unit: str) -> None:
    _results[(name, system)] = value
    print(json.dumps({"name": name, "system": system, "value": round(value, 4), "unit": unit}), flush=True)


class Port(Worker):
    """Either end of a channel."""

    def put_small(self, channel: Channel, count: int) -> float:
        started_s = time.time()
        for _ in range(count):
            channel.put(SMALL)
        channel.flush()
        return started_s

    def take_small(self, channel: Channel) -> tuple[int, float]:
        count = sum(1 for _ in channel)
        return count, time.time()

    def put_arrays(self, channel: Channel, count: int, num_bytes: int) -> float:
        array = np.ones(num_bytes // 8)
        started_s = time.time()
        for _ in range(count):
            channel.put(array)
        return started_s

    def take_arrays(self, channel: Channel, count: int) -> float:
        for _ in range(count):
            array = channel.take()
            assert array[-1] == 1.0
        return time.time()

    def echo(self, forth: Channel, back: Channel, count: int) -> None:
        for _ in range(count):
            back.put(forth.take())


def rill(num_small: int, num_large: int, wide: int) -> None:
    with Cluster(devices="cpu:2") as cluster:
        for width in dict.fromkeys((1, 4, wide)):
            producers = _launch(cluster, f"producer{width}", 0, width)
            consumers = _launch(cluster, f"consumer{width}", 1, width)
            _small_items(cluster, producers, consumers, num_small, width)
            if width == 1:
                _latency(cluster, consumers, 300)
                _large_items(cluster, producers, consumers, num_large)
                _broker_traffic(cluster, producers, consumers)
            producers.close()
            consumers.close()


def _launch(cluster: Cluster, name: str, device: int, width: int) -> WorkerGroup[Port]:
    return Port.launch(
        cluster, name=name, placement=f"{device}:0-{width - 1}" if width > 1 else device, threads=1
    )


def _small_items(
    cluster: Cluster, producers: WorkerGroup[Port], consumers: WorkerGroup[Port], count: int, width: int
) -> None:
    for name in ("warm", "small"):
        channel = Channel.create(cluster, f"{name}-{width}")
        taking = consumers.take_small(channel)
        started = producers.put_small(channel, count // width).wait(timeout_s=600)
        channel.end()
        ended = taking.wait(timeout_s=600)
        assert sum(taken for taken, _ in ended) == count // width * width
    rate = count / (max(end_s for _, end_s in ended) - min(started))
    report(f"small items, {width} to {width}", "rill", rate, "items/s")


def _latency(cluster: Cluster, consumers: WorkerGroup[Port], count: int) -> None:
    forth, back = Channel.create(cluster, "forth"), Channel.create(cluster, "back")
    echoing = consumers.echo(forth, back, count)
    forth.put(0)
    back.take()
    started_s = time.perf_counter()
    for n in range(1, count):
        forth.put(n)
        back.take()
    report("put, take, put, take", "rill", (time.perf_counter() - started_s) / (count - 1) * 1e6, "us")
    echoing.wait(timeout_s=60)


def _large_items(
    cluster: Cluster, producers: WorkerGroup[Port], consumers: WorkerGroup[Port], count: int
) -> None:
    for name in ("warm", "large"):
        channel = Channel.create(cluster, f"{name}-arrays", capacity_items=4)
        taking = consumers.take_arrays(channel, count)
        (started_s,) = producers.put_arrays(channel, count, LARGE_BYTES).wait(timeout_s=600)
        (ended_s,) = taking.wait(timeout_s=600)
    report("16 MB arrays", "rill", count * LARGE_BYTES / (ended_s - started_s) / 1e9, "GB/s")


def _broker_traffic(cluster: Cluster, producers: WorkerGroup[Port], consumers: WorkerGroup[Port]) -> None:
    """Bytes that the hub writes to its journal: every descriptor and every request, and nothing else."""
    for num_bytes in (16 * 1024, 1024 * 1024, LARGE_BYTES):
        channel = Channel.create(cluster, f"traffic-{num_bytes}", capacity_items=8)
        before = _journal_bytes(cluster)
        taking = consumers.take_arrays(channel, 50)
        producers.put_arrays(channel, 50, num_bytes).wait(timeout_s=600)
        taking.wait(timeout_s=600)
        time.sleep(0.1)
        per_item = (_journal_bytes(cluster) - before) / 50
        report(f"broker traffic per item of {num_bytes // 1024} KB", "rill", per_item, "bytes")


def _journal_bytes(cluster: Cluster) -> int:
    return sum(path.stat().st_size for path in cluster.session.session_dir.glob("hub.*.log"))


# --- rivals and limits ------------------------------------------------------------------------------------


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

        def make(self, num_bytes: int) -> Any:
            return np.ones(num_bytes // 8)

        def look(self, array: Any) -> float:
            return float(array[-1])

    actor: Any = End
    producer, consumer, queue = actor.remote(), actor.remote(), Queue()
    for count in (50, max(200, num_small // 100)):
        taking = consumer.take_small.remote(queue, count)
        started_s = ray.get(producer.put_small.remote(queue, count))
        seconds = ray.get(taking) - started_s
    report("small items, 1 to 1", "ray queue actor", count / seconds, "items/s")
    ray.get(consumer.look.remote(producer.make.remote(LARGE_BYTES)))
    started_s = time.perf_counter()
    for _ in range(num_large):
        ray.get(consumer.look.remote(producer.make.remote(LARGE_BYTES)))
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


def zmq_ipc(num_small: int, num_large: int) -> None:
    import zmq

    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/s"
        context = multiprocessing.get_context("spawn")
        for name, num_bytes, count, unit in (
            ("small items, 1 to 1", 64, num_small, "items/s"),
            ("16 MB arrays", LARGE_BYTES, num_large, "GB/s"),
        ):
            socket: Any = zmq.Context.instance().socket(zmq.PULL)
            socket.setsockopt(zmq.RCVHWM, 4 if num_bytes > 1024 else 10_000)
            socket.bind(endpoint)
            process = context.Process(target=_push, args=(endpoint, num_bytes, count))
            process.start()
            socket.recv()
            started_s = time.perf_counter()
            for _ in range(count - 1):
                socket.recv(copy=False)
            rate = (count - 1) / (time.perf_counter() - started_s)
            report(name, "pyzmq ipc (limit)", rate if unit == "items/s" else rate * num_bytes / 1e9, unit)
            process.join()
            socket.close()


def _push(endpoint: str, num_bytes: int, count: int) -> None:
    import zmq

    socket: Any = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 4 if num_bytes > 1024 else 10_000)
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


def shm(_num_small: int, num_large: int) -> None:
    """One copy into warm shared memory, and one in and one out."""
    source, target = np.ones(LARGE_BYTES, np.uint8), np.empty(LARGE_BYTES, np.uint8)
    with _shared_memory(LARGE_BYTES) as memory:
        shared = np.frombuffer(memory, np.uint8)
        np.copyto(shared, source)
        for name, both in (("shared memory, copied in", False), ("shared memory, copied in and out", True)):
            started_s = time.perf_counter()
            for _ in range(num_large):
                np.copyto(shared, source)
                if both:
                    np.copyto(target, shared)
            rate = num_large * LARGE_BYTES / (time.perf_counter() - started_s) / 1e9
            report("16 MB arrays", f"{name} (limit)", rate, "GB/s")
        del shared


RIVALS: dict[str, Callable[[int, int], None]] = {
    "ray": ray,
    "multiprocessing": multiprocessing_queue,
    "zmq": zmq_ipc,
    "shm": shm,
}


def ratios() -> None:
    for (name, system), value in list(_results.items()):
        ours = _results.get((name, "rill"))
        if system != "rill" and ours is not None:
            print(json.dumps({"name": name, "rill / " + system: round(ours / value, 2)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, for a smoke run")
    parser.add_argument("--rivals", default=",".join(RIVALS))
    args = parser.parse_args()
    num_small, num_large = (20_000, 30) if args.quick else (200_000, 300)
    rill(num_small, num_large, wide=4 if args.quick and (os.cpu_count() or 1) < 8 else 16)
    for rival in filter(None, args.rivals.split(",")):
        if rival != "ray" or importlib.util.find_spec("ray") is not None:
            RIVALS[rival](num_small, num_large)
    ratios()


if __name__ == "__main__":
    main()

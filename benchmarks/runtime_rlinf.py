"""RLinf's side of runtime_channel.py, over its public interface. Runs with the Python of an environment of its own:

    python -m venv rlinf && rlinf/bin/pip install torch 'ray[default]' numpy hydra-core omegaconf icmplib debugpy \
        nvitop sortedcontainers einops && rlinf/bin/pip install --no-deps rlinf==0.3.0

Imports nothing of rill. Prints JSON lines {"name", "value", "unit"} with the names that runtime_channel.py compares.
"""

from __future__ import annotations

import time

STARTED_S = time.perf_counter()  # start-up is counted from before the imports, as for everybody

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections import deque  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

import psutil  # noqa: E402
import torch  # noqa: E402
from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker  # type: ignore[import-not-found] # noqa: E402

SMALL = {"prompt_id": "gsm8k/17", "reward": 1.0}
LARGE_BYTES = 16 * 1024 * 1024


def report(name: str, value: float, unit: str) -> None:
    print(json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


class Port(Worker):  # type: ignore[misc]
    """Either end of a channel."""

    def nothing(self) -> None:
        pass

    def put_items(self, channel: Any, count: int, num_bytes: int, in_flight: int) -> float:
        item = SMALL if not num_bytes else torch.ones(num_bytes // 8, dtype=torch.float64)
        started_s = time.time()
        if in_flight == 1:
            for _ in range(count):
                channel.put(item)
            return started_s
        running: deque[Any] = deque()
        for _ in range(count):
            if len(running) == in_flight:
                running.popleft().wait()
            running.append(channel.put(item, async_op=True))
        for work in running:
            work.wait()
        return started_s

    def get_items(self, channel: Any, count: int, in_flight: int) -> float:
        if in_flight == 1:
            for _ in range(count):
                channel.get()
            return time.time()
        running: deque[Any] = deque()
        for _ in range(count):
            if len(running) == in_flight:
                running.popleft().wait()
            running.append(channel.get(async_op=True))
        for work in running:
            work.wait()
        return time.time()


def items_per_second(producer: Any, consumer: Any, count: int, num_bytes: int, in_flight: int) -> float:
    """Best of what a user can write: one after the other, or several in flight."""
    channel = Channel.create(f"items-{num_bytes}-{in_flight}-{count}")
    for number in (5, count):
        getting = consumer.get_items(channel, number, in_flight)
        (started_s,) = producer.put_items(channel, number, num_bytes, in_flight).wait()
        (ended_s,) = getting.wait()
    return count / float(ended_s - started_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-small", type=int, default=1000)
    parser.add_argument("--num-large", type=int, default=40)
    parser.add_argument("--num-calls", type=int, default=500)
    args = parser.parse_args()
    cluster = Cluster(num_nodes=1)
    place = NodePlacementStrategy(node_ranks=[0])
    producer = Port.create_group().launch(cluster, name="producer", placement_strategy=place)
    consumer = Port.create_group().launch(cluster, name="consumer", placement_strategy=place)
    channel = Channel.create("first")
    getting = consumer.get_items(channel, 5, 1)
    producer.put_items(channel, 5, 0, 1).wait()
    getting.wait()
    report("startup to five items", time.perf_counter() - STARTED_S, "s")
    time.sleep(1.0)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    report("idle memory", sum(process.memory_full_info().pss for process in processes) / 1e6, "MB")
    report("idle processes", len(processes), "processes")
    samples = []
    for _ in range(args.num_calls):
        started_s = time.perf_counter()
        producer.nothing().wait()
        samples.append(time.perf_counter() - started_s)
    report("call round trip", 1e6 * median(samples), "us")
    small = [items_per_second(producer, consumer, args.num_small, 0, n) for n in (1, 16)]
    report("small items, 1 to 1", max(small), "items/s")
    large = [items_per_second(producer, consumer, args.num_large, LARGE_BYTES, n) for n in (1, 4)]
    report("16 MB arrays", max(large) * LARGE_BYTES / 1e9, "GB/s")
    os._exit(0)  # its own shutdown takes long, and Ray's processes end with their driver


main()  # without a guard: `make bench` runs the files that have one, and this one needs another Python

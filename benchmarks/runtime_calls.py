"""Start-up, calls, added ranks, point-to-point transfer and idle memory of the runtime, and of Ray on this machine.

    python benchmarks/runtime_calls.py [--quick] [--rivals ray] [--ranks 8,128,1024 | --by-turns]

Prints one JSON line per measurement: {"name", "system", "value", "unit"}. A rival that is not installed is left out.
runtime_channel.py runs this too, adds channels and RLinf, and compares everything with the targets.

Start-up is counted from before the first import until five items have gone through a channel from one group to
another; idle memory and the number of processes are taken then, in the same program.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.worker import Worker

ROOT = Path(__file__).parents[1]
RESULTS: dict[tuple[str, str], float] = {}
"""Every value that was reported, by name and system."""


def report(name: str, system: str, value: float, unit: str) -> None:
    RESULTS[(name, system)] = value
    print(json.dumps({"name": name, "system": system, "value": round(value, 6), "unit": unit}), flush=True)


class Node(Worker):
    """One end of every measurement."""

    def nothing(self) -> None:
        pass

    def stay_busy(self, seconds: float) -> None:
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            time.sleep(0.001)

    def put_five(self, channel: Channel) -> None:
        for n in range(5):
            channel.put(n)

    def take_five(self, channel: Channel) -> None:
        for _ in range(5):
            channel.take()

    def send_arrays(self, num_bytes: int, count: int) -> None:
        import numpy as np

        array = np.ones(num_bytes, np.uint8)
        for _ in range(count):
            self.send(array, self.group_name, 1)
        self.recv(self.group_name, 1)

    def receive_arrays(self, count: int) -> float:
        self.recv(self.group_name, 0)
        started_s = time.perf_counter()
        for _ in range(count - 1):
            self.recv(self.group_name, 0)
        seconds = time.perf_counter() - started_s
        self.send(None, self.group_name, 0)
        return seconds

    def ping(self, count: int) -> float:
        started_s = time.perf_counter()
        for n in range(count):
            if self.rank == 0:
                self.send(n, self.group_name, 1)
                self.recv(self.group_name, 1)
            else:
                self.send(self.recv(self.group_name, 0), self.group_name, 0)
        return (time.perf_counter() - started_s) / count


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        action()
        samples.append(time.perf_counter() - started_s)
    return median(samples)


def measure_rill(backend: str, num_calls: int, num_arrays: int) -> None:
    system = f"rill-{backend}"
    with Cluster(devices="cpu:2") if backend == "local" else Cluster.ray("local", devices="cpu:2") as cluster:
        group = Node.launch(cluster, name="node", threads=1)
        one, both = group.on(0), group
        for _ in range(50):
            one.nothing().wait(30)
        report(
            "call round trip", system, 1e6 * median_seconds(lambda: one.nothing().wait(30), num_calls), "us"
        )
        report(
            "group_call_2_ranks",
            system,
            1e6 * median_seconds(lambda: both.nothing().wait(30), num_calls),
            "us",
        )
        started_s = time.perf_counter()
        for handle in [one.nothing() for _ in range(num_calls)]:
            handle.wait(30)
        report("calls_in_flight", system, num_calls / (time.perf_counter() - started_s), "calls/s")
        group.ping(20).wait(120)  # connections are made at first use
        report("p2p_round_trip", system, 1e6 * max(group.ping(num_calls).wait(120)), "us")
        for num_bytes in (16 * 2**20, 64 * 2**20):
            sending = group.on(0).send_arrays(num_bytes, num_arrays)
            (seconds,) = group.on(1).receive_arrays(num_arrays).wait(120)
            sending.wait(30)
            rate = num_bytes * (num_arrays - 1) / seconds / 1e6
            report(f"p2p_{num_bytes >> 20}MiB", system, rate, "MB/s")


def measure_add(repeats: int) -> None:
    """A rank that joins a group at work, over the start of a group of one in the same cluster; the goal is 2."""
    with Cluster(devices="cpu:1", preload=["numpy"]) as cluster:
        group = Node.launch(cluster, name="node", threads=1)
        launches, additions = [], []
        for n in range(repeats):
            started_s = time.perf_counter()
            other = Node.launch(cluster, name=f"node{n}", threads=1)
            launches.append(time.perf_counter() - started_s)
            other.close()
            busy = group.on(0).stay_busy(1.0)
            started_s = time.perf_counter()
            (rank,) = group.add(placement="0")
            additions.append(time.perf_counter() - started_s)
            busy.wait(60)
            group.remove(rank)
    report("add a rank", "rill-local", median(additions), "s")
    report("add over launch", "rill-local", median(additions) / median(launches), "ratio")


def measure_round_trips(num_rounds: int = 12, num_calls: int = 100) -> None:
    """One call's round trip, here, on Ray and of Ray by turns: the machine's mood is the same for all."""
    import ray

    actor = start_ray_actor()
    with Cluster(devices="cpu:1") as cluster, Cluster.ray("auto", devices="cpu:1") as on_ray:
        one = Node.launch(cluster, name="node", threads=1).on(0)
        other = Node.launch(on_ray, name="node", threads=1).on(0)
        calls: dict[str, Callable[[], object]] = {
            "rill-local": lambda: one.nothing().wait(30),
            "rill-ray": lambda: other.nothing().wait(30),
            "ray": lambda: ray.get(actor.nothing.remote()),
        }
        samples: dict[str, list[float]] = {system: [] for system in calls}
        for _ in range(num_rounds):
            for system, call in calls.items():
                samples[system].append(median_seconds(call, num_calls))
        for system, seconds in samples.items():
            report("call round trip by turns", system, 1e6 * min(seconds), "us (best of the medians)")
        for system in ("rill-local", "rill-ray"):
            ratios = [mine / theirs for mine, theirs in zip(samples[system], samples["ray"], strict=True)]
            report(
                "call round trip by turns",
                f"{system} over ray",
                median(ratios),
                "ratio (median of the turns)",
            )
    ray.shutdown()


def start_ray_actor() -> Any:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

    @ray.remote
    class Actor:
        def nothing(self) -> None:
            pass

    actor: Any = Actor
    started = actor.remote()
    for _ in range(50):
        ray.get(started.nothing.remote())
    return started


def measure_many_ranks(num_ranks: int, num_calls: int = 20) -> None:
    """The driver with many ranks, a process and a message each."""
    with Cluster(devices="cpu:1") as cluster:
        started_s = time.perf_counter()
        group = Node.launch(
            cluster,
            name="node",
            placement=f"0:0-{num_ranks - 1}",
            threads=1,
        )
        report(f"launch_{num_ranks}_ranks", "rill-local", time.perf_counter() - started_s, "s")
        group.nothing().wait(120)
        began_s = time.process_time()
        seconds = median_seconds(lambda: group.nothing().wait(120), num_calls)
        cpu_s = (time.process_time() - began_s) / num_calls
        report(f"group_call_{num_ranks}_ranks", "rill-local", 1e3 * seconds, "ms")
        report(f"driver_cpu_per_group_call_{num_ranks}_ranks", "rill-local", 1e3 * cpu_s, "ms")
        memory_mb, _ = tree_memory(os.getpid())
        report(f"idle_memory_{num_ranks}_ranks", "rill-local", memory_mb, "MB (PSS)")


def tree_memory(root: int) -> tuple[float, int]:
    """Proportional memory in MB of a process and all its descendants, shared pages counted once; and how many."""
    import psutil

    processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 1e6, len(processes)


_RILL_STARTUP = """
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from benchmarks.runtime_calls import Node, print_startup
with {cluster} as cluster:
    producer = Node.launch_async(cluster, name="producer", placement="0", threads=1)
    consumer = Node.launch_async(cluster, name="consumer", placement="1", threads=1)
    channel = Channel.create(cluster, "first")
    taking = consumer.take_five(channel)
    producer.put_five(channel).wait(60)
    taking.wait(60)
    print_startup(started_s)
"""
STARTUP = {
    "rill-local": _RILL_STARTUP.format(cluster='Cluster(devices="cpu:2")'),
    "rill-ray": _RILL_STARTUP.format(cluster='Cluster.ray("local", devices="cpu:2")'),
    "ray": """
import ray
from ray.util.queue import Queue
from benchmarks.runtime_calls import print_startup
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
@ray.remote
class Node:
    def put_five(self, queue):
        for n in range(5): queue.put(n)
    def take_five(self, queue):
        for n in range(5): queue.get()
producer, consumer, queue = Node.remote(), Node.remote(), Queue()
ray.get([producer.put_five.remote(queue), consumer.take_five.remote(queue)])
print_startup(started_s)
""",
}


def print_startup(started_s: float) -> None:
    """The last step of a start-up program: how long it took, and what it holds now."""
    seconds = time.perf_counter() - started_s
    time.sleep(1.0)
    print(seconds, *tree_memory(os.getpid()))


def measure_startup(system: str, repeats: int) -> None:
    code = "import time; started_s = time.perf_counter()\n" + STARTUP[system]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    samples = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            raise SystemExit(f"{system} did not start:\n{done.stderr[-2000:]}")
        seconds, memory_mb, num_processes = map(float, done.stdout.split()[-3:])
        samples.append(seconds)
    report("startup to five items", system, median(samples), "s")
    report("idle memory", system, memory_mb, "MB (PSS, driver and all it started)")
    report("idle processes", system, num_processes, "processes")


def measure_ray(num_calls: int, num_arrays: int) -> None:
    import numpy as np
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

    @ray.remote
    class Actor:
        def nothing(self) -> None:
            pass

        def make(self, num_bytes: int) -> object:
            return np.ones(num_bytes, np.uint8)

        def take(self, array: object) -> None:
            pass

    actor: Any = Actor
    first, second = actor.remote(), actor.remote()
    ray.get([first.nothing.remote(), second.nothing.remote()])
    report(
        "call round trip",
        "ray",
        1e6 * median_seconds(lambda: ray.get(first.nothing.remote()), num_calls),
        "us",
    )
    pair = (first, second)
    both = median_seconds(lambda: ray.get([one.nothing.remote() for one in pair]), num_calls)
    report("group_call_2_ranks", "ray", 1e6 * both, "us")
    for num_bytes in (16 * 2**20, 64 * 2**20):
        ray.get(second.take.remote(first.make.remote(num_bytes)))
        started_s = time.perf_counter()
        for _ in range(num_arrays):
            ray.get(second.take.remote(first.make.remote(num_bytes)))
        rate = num_bytes * num_arrays / (time.perf_counter() - started_s) / 1e6
        report(f"p2p_{num_bytes >> 20}MiB", "ray", rate, "MB/s")
    ray.shutdown()


def measure(*, quick: bool, rivals: list[str]) -> None:
    """Everything in this file, except many ranks."""
    num_calls, num_arrays, repeats = (100, 4, 1) if quick else (3000, 40, 3)
    measure_startup("rill-local", repeats)
    measure_rill("local", num_calls, num_arrays)
    measure_add(repeats * 3)
    if "ray" in rivals:
        measure_startup("ray", 1)
        measure_startup("rill-ray", repeats)
        measure_rill("ray", num_calls, num_arrays)
        measure_ray(num_calls, num_arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats: checks that it runs")
    parser.add_argument("--rivals", default="ray", help="comma-separated: ray; empty for none")
    parser.add_argument(
        "--ranks", default="", help="measure groups of so many ranks instead, e.g. 8,128,1024"
    )
    parser.add_argument(
        "--by-turns", action="store_true", help="measure only a call's round trip, against Ray"
    )
    args = parser.parse_args()
    if args.by_turns:
        measure_round_trips()
        return
    if args.ranks:
        for num_ranks in args.ranks.split(","):
            measure_many_ranks(int(num_ranks))
        return
    measure(quick=args.quick, rivals=[n for n in args.rivals.split(",") if n and importlib.util.find_spec(n)])


if __name__ == "__main__":
    main()

"""The runtime against its targets: start-up, calls, channels and memory, of rill, of its rivals and of the machine.

    python benchmarks/runtime_channel.py [--quick] [--rivals ray,multiprocessing,zmq] [--rlinf-python PATH]

Prints one JSON line per measurement, {"name", "system", "value", "unit"}, then the ratios, then one line per target:
{"target", "is", "should be", "met"}. All in one run on one machine:

- rill on its local backend and on Ray, and between two nodes rehearsed on this machine (TCP);
- rivals: Ray (actor call, queue actor, object store), multiprocessing.Queue; left out when not installed; RLinf, with
  the Python of an environment of its own (runtime_rlinf.py says how to make one);
- physical limits: raw pyzmq messages over ipc and TCP, and copies into and out of recycled shared memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks import runtime_calls
from benchmarks.runtime_calls import RESULTS, report
from benchmarks.runtime_rivals import LARGE_BYTES, RIVALS, SMALL, TCP_ARRAYS, copy_rates
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.process.backend import LocalBackend
from rill.runtime.worker import Worker

COPY_IN, COPY_IN_AND_OUT = (f"shared memory, {what} (limit)" for what in ("copied in", "copied in and out"))
TURNS = 3
"""Of every measurement that takes turns with another; the median counts. One more, before them, warms up."""


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

    def relay(self, taken: Channel, made: Channel) -> int:
        count = 0
        for item in taken:
            made.put(item)
            count += 1
        return count

    def echo(self, forth: Channel, back: Channel, count: int) -> None:
        for _ in range(count):
            back.put(forth.take())


def rill(cluster: Cluster, system: str, num_small: int, num_large: int, widths: Sequence[int]) -> None:
    """Widths take turns, and so do arrays and the machine's own copies: its mood is then the same for all of them."""
    pairs = {
        width: (
            _launch(cluster, f"producer{width}", 0, width),
            _launch(cluster, f"consumer{width}", 1, width),
        )
        for width in widths
    }
    rates: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(1 + TURNS):
        for width, (producers, consumers) in pairs.items():
            rates[width].append(_small_rate(cluster, producers, consumers, num_small, f"{width}-{turn}"))
    for width in widths:
        report(f"small items, {width} to {width}", system, median(rates[width][1:]), "items/s")
    producers, consumers = pairs[1]
    _latency(cluster, consumers, 300, system)
    _relay(cluster, producers, consumers, num_small // 4, system)
    arrays, copies = [], []
    for turn in range(1 + TURNS):
        arrays.append(_large_rate(cluster, producers, consumers, num_large, f"arrays-{turn}"))
        copies.append(copy_rates(num_large))
    report(ARRAYS, system, median(arrays[1:]), "GB/s")
    if system == LOCAL:
        for name, values in zip((COPY_IN, COPY_IN_AND_OUT), zip(*copies[1:], strict=True), strict=True):
            report(ARRAYS, name, median(values), "GB/s")
    _broker_traffic(cluster, producers, consumers, system)
    for group in (group for pair in pairs.values() for group in pair):
        group.close()


def _relay(
    cluster: Cluster, producers: WorkerGroup[Port], consumers: WorkerGroup[Port], count: int, system: str
) -> None:
    """Every item that is taken and the one that is put in its place are one record."""
    rates = []
    for turn in range(1 + TURNS):
        taken, made = (Channel.create(cluster, f"{end}-{turn}") for end in ("taken", "made"))
        producers.put_small(taken, count).wait(timeout_s=600)
        taken.end()
        started_s = time.time()
        assert consumers.relay(taken, made).wait(timeout_s=600) == [count]
        rates.append(count / (time.time() - started_s))
        made.close()
    report("relayed items, 1 to 1", system, median(rates[1:]), "items/s")


def _launch(cluster: Cluster, name: str, device: int, width: int) -> WorkerGroup[Port]:
    return Port.launch(
        cluster, name=name, placement=f"{device}:0-{width - 1}" if width > 1 else device, threads=1
    )


def _small_rate(
    cluster: Cluster, producers: WorkerGroup[Port], consumers: WorkerGroup[Port], count: int, name: str
) -> float:
    channel = Channel.create(cluster, f"small-{name}")
    taking = consumers.take_small(channel)
    width = len(producers.addresses())
    started = producers.put_small(channel, count // width).wait(timeout_s=600)
    channel.end()
    ended = taking.wait(timeout_s=600)
    assert sum(taken for taken, _ in ended) == count // width * width
    return count / float(max(end_s for _, end_s in ended) - min(started))


def _latency(cluster: Cluster, consumers: WorkerGroup[Port], count: int, system: str) -> None:
    forth, back = Channel.create(cluster, "forth"), Channel.create(cluster, "back")
    echoing = consumers.echo(forth, back, count)
    forth.put(0)
    back.take()
    started_s = time.perf_counter()
    for n in range(1, count):
        forth.put(n)
        back.take()
    report("put, take, put, take", system, (time.perf_counter() - started_s) / (count - 1) * 1e6, "us")
    echoing.wait(timeout_s=60)


def _large_rate(
    cluster: Cluster, producers: WorkerGroup[Port], consumers: WorkerGroup[Port], count: int, name: str
) -> float:
    channel = Channel.create(cluster, name, capacity_items=4)
    taking = consumers.take_arrays(channel, count)
    (started_s,) = producers.put_arrays(channel, count, LARGE_BYTES).wait(timeout_s=600)
    (ended_s,) = taking.wait(timeout_s=600)
    return count * LARGE_BYTES / float(ended_s - started_s) / 1e9


def _broker_traffic(
    cluster: Cluster, producers: WorkerGroup[Port], consumers: WorkerGroup[Port], system: str
) -> None:
    """Bytes that the hub writes to its journal: every descriptor and every request, and nothing else."""
    for num_bytes in (16 * 1024, 1024 * 1024, LARGE_BYTES):
        per_item, turn = -1.0, 0
        while per_item < 0 and turn < 5:  # the journal was cut meanwhile
            channel = Channel.create(cluster, f"traffic-{num_bytes}-{turn}", capacity_items=8)
            before, turn = _journal_bytes(cluster), turn + 1
            taking = consumers.take_arrays(channel, 50)
            producers.put_arrays(channel, 50, num_bytes).wait(timeout_s=600)
            taking.wait(timeout_s=600)
            time.sleep(0.1)
            per_item = (_journal_bytes(cluster) - before) / 50
        report(f"broker traffic per item of {num_bytes // 1024} KB", system, per_item, "bytes")


def between_nodes(num_large: int) -> None:
    """From one node to another, as far as one machine can show it: everything goes over TCP on the loopback device."""
    with Cluster(backend=LocalBackend("cpu:1", num_nodes=2)) as cluster:
        producers, consumers = _launch(cluster, "producer", 0, 1), _launch(cluster, "consumer", 1, 1)
        rates = [_large_rate(cluster, producers, consumers, num_large, f"{turn}") for turn in range(2)]
        report(TCP_ARRAYS, LOCAL, rates[-1], "GB/s")


def _journal_bytes(cluster: Cluster) -> int:
    return sum(path.stat().st_size for path in cluster.session.session_dir.glob("hub.*.log"))


def rlinf(python: str, *, quick: bool) -> None:
    """RLinf in its own environment; its figures come back as JSON lines."""
    sizes = ("200", "10", "100") if quick else ("1000", "40", "500")
    options = zip(("--num-small", "--num-large", "--num-calls"), sizes, strict=True)
    script = Path(__file__).with_name("runtime_rlinf.py")
    command = [python, str(script), *(word for option in options for word in option)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"RLinf did not run:\n{done.stderr[-3000:]}")
    for line in done.stdout.splitlines():
        if line.startswith('{"name"'):
            row = json.loads(line)
            report(row["name"], "rlinf", row["value"], row["unit"])


# --- comparison -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio of two measurements and its bound."""

    what: str
    ours: tuple[str, str]
    theirs: tuple[str, str]
    at_least: float = 0.0
    at_most: float = float("inf")

    def report(self) -> None:
        if self.ours in RESULTS and self.theirs in RESULTS:
            ratio = RESULTS[self.ours] / RESULTS[self.theirs]
            bound = f">= {self.at_least:g}" if self.at_least else f"<= {self.at_most:g}"
            line = {"target": self.what, "is": round(ratio, 4), "should be": bound}
            print(json.dumps({**line, "met": self.at_least <= ratio <= self.at_most}), flush=True)


SMALL_ITEMS, ARRAYS, STARTUP, CALL = (
    "small items, 1 to 1",
    "16 MB arrays",
    "startup to five items",
    "call round trip",
)
LOCAL, ON_RAY, RLINF = "rill-local", "rill-ray", "rlinf"
TARGETS = (
    Target("start-up / RLinf's", (STARTUP, LOCAL), (STARTUP, RLINF), at_most=0.1),
    Target("start-up on Ray / RLinf's", (STARTUP, ON_RAY), (STARTUP, RLINF), at_most=0.5),
    Target("small items / RLinf's", (SMALL_ITEMS, LOCAL), (SMALL_ITEMS, RLINF), at_least=100),
    Target("small items on Ray / RLinf's", (SMALL_ITEMS, ON_RAY), (SMALL_ITEMS, RLINF), at_least=100),
    Target(
        "small items / a Ray queue actor's",
        (SMALL_ITEMS, LOCAL),
        (SMALL_ITEMS, "ray queue actor"),
        at_least=20,
    ),
    Target(
        "16 producers and 16 consumers / one pair",
        ("small items, 16 to 16", LOCAL),
        (SMALL_ITEMS, LOCAL),
        at_least=0.9,
    ),
    Target("16 MB tensors / RLinf's", (ARRAYS, LOCAL), (ARRAYS, RLINF), at_least=5),
    Target("16 MB tensors on Ray / RLinf's", (ARRAYS, ON_RAY), (ARRAYS, RLINF), at_least=5),
    Target(
        "16 MB tensors / shared memory, copied in and out",
        (ARRAYS, LOCAL),
        (ARRAYS, COPY_IN_AND_OUT),
        at_least=0.6,
    ),
    Target(
        "broker traffic per item of 16 MB / of 16 KB",
        ("broker traffic per item of 16384 KB", LOCAL),
        ("broker traffic per item of 16 KB", LOCAL),
        at_most=1.1,
    ),
    Target("group call / Ray's actor call", (CALL, LOCAL), (CALL, "ray"), at_most=0.25),
    Target("group call on Ray / Ray's actor call", (CALL, ON_RAY), (CALL, "ray"), at_most=0.25),
    Target("idle memory / RLinf's", ("idle memory", LOCAL), ("idle memory", RLINF), at_most=0.2),
)


def ratios() -> None:
    for (name, system), value in list(RESULTS.items()):
        ours = RESULTS.get((name, LOCAL))
        if system != LOCAL and ours is not None and value:
            print(json.dumps({"name": name, "rill-local / " + system: round(ours / value, 4)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work")
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument("--rlinf-python", default="", help="the Python of an environment that has RLinf")
    args = parser.parse_args()
    num_small, num_large = (60_000, 30) if args.quick else (200_000, 200)
    rivals = [name for name in args.rivals.split(",") if name]
    if "ray" in rivals and importlib.util.find_spec("ray") is None:
        rivals.remove("ray")
    runtime_calls.measure(quick=args.quick, rivals=rivals)
    with Cluster(devices="cpu:2") as cluster:
        rill(cluster, LOCAL, num_small, num_large, (1, 4, 16))
    if "ray" in rivals:
        with Cluster.ray("local", devices="cpu:2") as cluster:
            rill(cluster, ON_RAY, num_small, num_large, (1,))
    between_nodes(num_large)
    for rival in rivals:
        RIVALS[rival](num_small, num_large)
    if args.rlinf_python:
        rlinf(args.rlinf_python, quick=args.quick)
    ratios()
    for target in TARGETS:
        target.report()


if __name__ == "__main__":
    main()

"""A driver that the lifecycle tests start as a script, with its worker class in __main__."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.worker import Worker
from tests.runtime.channel_workers import Consumer, Producer
from tests.runtime.chaos_workers import Sharer


@dataclass
class Note:
    text: str


class Scripted(Worker):
    def answer(self, note: Note) -> Note:
        return Note(f"{note.text} from {self.rank}")

    def pid(self) -> int:
        return os.getpid()

    def spin(self) -> None:
        while True:
            time.sleep(0.1)


def traffic(folder: Path) -> None:
    """Items in flow and turns on a shared device, until the end."""
    cluster = Cluster(devices="cpu:2")
    channel = Channel.create(cluster, "items", capacity_items=64)
    producer = Producer.launch_async(cluster, name="producer", placement="0", threads=1)
    consumer = Consumer.launch_async(cluster, name="consumer", placement="1", threads=1)
    sharers = [Sharer.launch_async(cluster, name=f"s{n}", placement="0", threads=1) for n in range(2)]
    producer.produce_until_killed(channel, os.devnull, 20_000)
    consumer.consume_and_log(channel, os.devnull)
    for sharer in sharers:
        sharer.take_turns(str(folder / "lock"), os.devnull, 0)
    time.sleep(600)


def main() -> None:
    if sys.argv[1] == "traffic":
        (Path(sys.argv[2]) / "lock").touch()
        traffic(Path(sys.argv[2]))
    cluster = Cluster(devices="cpu:2")
    group = Scripted.launch(cluster, name="scripted", threads=1)
    answers = group.answer(Note("hello")).wait(20)
    cluster.context.hub.sync(20)
    print(*(note.text for note in answers), sep=",", flush=True)
    pids = [*group.pid().wait(20), cluster._nodes["node0"].agent_pid]  # type: ignore[attr-defined]
    print(*pids, cluster.session.session_dir, cluster.session.shm_dir, flush=True)
    if sys.argv[1] == "exit":
        return
    if sys.argv[1] == "raise":
        raise RuntimeError("as asked")
    group.spin()
    print("spinning", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()

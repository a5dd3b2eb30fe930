"""A driver that the lifecycle tests start as a script, with its worker class in __main__."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from rill.runtime.cluster import Cluster
from rill.runtime.worker import Worker


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


def main() -> None:
    cluster = Cluster(devices="cpu:2")
    group = Scripted.launch(cluster, name="scripted", threads=1)
    answers = group.answer(Note("hello")).wait(20)
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

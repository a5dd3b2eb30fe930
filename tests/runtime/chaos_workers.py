"""Workers that are killed. They import nothing heavy, so that they are back soon."""

from __future__ import annotations

import fcntl
import os
import random
import time

from rill.runtime.channel import Channel
from rill.runtime.worker import Worker

WAIT_S = 60.0


class Sharer(Worker):
    """Takes turns on a device for as long as it lives."""

    def take_turns(self, lock_path: str, log_path: str, seed: int) -> None:
        rng = random.Random(seed)
        while True:
            # Exclusive by the kernel, which also takes a killed process's hold away: a second group inside would fail.
            with self.device_lock(timeout_s=WAIT_S), open(lock_path) as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                time.sleep(rng.uniform(0.0, 0.01))
                with open(log_path, "a") as log:
                    log.write(f"{self.group_name}\n")


class PipelineStage(Worker):
    """Passes items on. Its "memory" on a device is a lock of the kernel's, which a second owner would not get."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.held: list[int] = []

    def onload(self) -> None:
        for device in self.devices:
            fd = os.open(f"{self.folder}/device-{device.id}", os.O_RDWR | os.O_CREAT)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.held.append(fd)

    def offload(self) -> None:
        while self.held:
            os.close(self.held.pop())

    def relay(self, inputs: Channel, outputs: Channel) -> int:
        count = 0
        with self.device_lock(inputs, outputs):
            for item in inputs:
                assert self.held, "it works without its memory"
                outputs.put(item)
                count += 1
        return count


class Crowd(Worker):
    """Ranks that are called while others of them die."""

    def plus(self, number: int) -> int:
        return self.rank + number

    def echo_through(self, channel: Channel) -> int:
        channel.put(self.rank)
        return int(channel.take(timeout_s=WAIT_S))

"""Workers that are killed. They import nothing heavy, so that they are back soon."""

from __future__ import annotations

import fcntl
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


class Crowd(Worker):
    """Ranks that share processes."""

    def plus(self, number: int) -> int:
        return self.rank + number

    def echo_through(self, channel: Channel) -> int:
        channel.put(self.rank)
        return int(channel.take(timeout_s=WAIT_S))

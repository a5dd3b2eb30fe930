"""Workers that the runtime's tests launch. They import nothing heavy, so that they start fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rill.runtime.group import WorkerGroup
from rill.runtime.worker import Worker, concurrent


class Echo(Worker):
    """Answers questions about itself and does as it is told."""

    def __init__(self, base: int = 0, fail_on_rank: int | None = None, marker: str | None = None) -> None:
        self.base = base
        self.marker = marker
        self.seen_at_init = (self.rank, self.world_size, self.group_name, self.device)
        self.released = threading.Event()
        self.calls: list[int] = []
        if fail_on_rank == self.rank:
            raise ValueError(f"rank {self.rank} cannot start")

    def add(self, number: int) -> int:
        return self.base + number

    def echo(self, value: Any) -> Any:
        return value

    def seat(self) -> tuple[int, int, str, str]:
        return self.seen_at_init

    def device_ids(self) -> list[int]:
        return [device.id for device in self.devices]

    def environment(self, *names: str) -> Mapping[str, str]:
        return {name: os.environ.get(name, "") for name in names}

    def modules(self, *names: str) -> list[str]:
        return [name for name in names if name in sys.modules]

    def pid(self) -> int:
        return os.getpid()

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def fail_on(self, rank: int, then_wait_s: float) -> None:
        if self.rank == rank:
            raise ValueError("asked to")
        time.sleep(then_wait_s)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def note(self, number: int) -> None:
        self.calls.append(number)

    def noted(self) -> list[int]:
        return self.calls

    def wait_for_release(self, timeout_s: float) -> bool:
        return self.released.wait(timeout_s)

    @concurrent
    def release(self) -> str:
        self.released.set()
        return threading.current_thread().name

    async def later(self, value: int) -> int:
        return value + 1

    def die(self, exit_code: int) -> None:
        sys.stderr.write("last words of the worker\n")
        sys.stderr.flush()
        os._exit(exit_code)

    def kill_self(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def timed(self) -> None:
        for _ in range(2):
            with self.timer("step"):
                time.sleep(0.01)

    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def call_other(self, other: WorkerGroup[Echo], number: int) -> list[int]:
        return other.add(number).wait(timeout_s=10)

    def close(self) -> None:
        if self.marker is not None:
            Path(f"{self.marker}-{self.rank}").write_text("closed")


class OneWay:
    """Travels once: what arrives cannot travel back."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_make_lambda, ())


def _make_lambda() -> object:
    return lambda: None

"""Workers that the runtime's tests launch. They import nothing heavy, so that they start fast."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rill.runtime.channel import Channel
from rill.runtime.context import current
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

    def plus(self, number: int) -> int:
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

    def hash_of(self, text: str) -> int:
        return hash(text)

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

    def find(self, name: str) -> Any:
        return current().hub.call("registry.find", name, 60)

    def take_one(self, channel: Channel) -> Any:
        return channel.take(20)

    def take_all(self, channel: Channel) -> list[Any]:
        return list(channel)

    def hold_the_interpreter(self, seconds: float) -> None:
        ctypes.PyDLL(None).usleep(int(1e6 * seconds))  # without letting go of the lock

    def keep(self, other: WorkerGroup[Echo]) -> None:
        self.kept = other

    def call_kept(self, number: int) -> list[int]:
        return self.kept.plus(number).wait(10)

    def call_other(self, other: WorkerGroup[Echo], number: int) -> list[int]:
        return other.plus(number).wait(timeout_s=10)

    def close(self) -> None:
        if self.marker is not None:
            Path(f"{self.marker}-{self.rank}").write_text("closed")


class Mute(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise AttributeError("no text")

    __repr__ = __str__


class Thorny(Echo):
    """Raises what is hard to pass on."""

    def thorn(self, kind: str) -> None:
        match kind:
            case "mute":
                raise Mute()
            case "unpicklable":
                error = ValueError("of the old school")
                error.lock = threading.Lock()  # type: ignore[attr-defined]
                raise error
            case "unknown there":
                module = types.ModuleType("only_here")
                sys.modules["only_here"] = module
                exec("class Stranger(Exception): pass", vars(module))
                raise module.Stranger("of the old school")
            case "no text":
                raise ValueError("a file called \udcff")
            case "caused":
                outer = ValueError("outer")
                outer.add_note("in the second epoch")
                raise outer from KeyError("inner")

    @concurrent
    def thorn_beside(self, kind: str) -> None:
        self.thorn(kind)

    def thorn_of(self, other: WorkerGroup[Thorny], kind: str) -> None:
        other.on(0).thorn(kind).wait(10)


class Slow(Echo):
    """Takes its time to start."""

    def __init__(self, start_s: float) -> None:
        time.sleep(start_s)
        super().__init__()


class Waiting(Worker):
    """Rank 0 waits for one that fails to start."""

    def __init__(self, how: str, go: str) -> None:
        if self.rank == 0:
            while not Path(go).exists():
                time.sleep(0.05)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("cannot start")
        elif how == "killed later":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()


class OneWay:
    """Travels once: what arrives cannot travel back."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_make_lambda, ())


def _make_lambda() -> object:
    return lambda: None


class Peer(Worker):
    """Sends to and receives from its peers."""

    def swap(self, num_floats: int) -> bool:
        import numpy as np

        other = 1 - self.rank
        value = {"rank": self.rank, "array": np.full(num_floats, self.rank, np.float32)}
        self.send(value, self.group_name, other)
        received = self.recv(self.group_name, other, timeout_s=10)
        array = received["array"]
        is_right = received["rank"] == other and bool((array == other).all()) and array.size == num_floats
        array += 1
        return is_right

    def routes(self) -> dict[str, int]:
        return current().transfer.routes

    @concurrent
    def num_lent(self) -> int:
        return len(current().parcels.lent)

    def to_myself(self) -> bool:
        value = [object()]
        self.send(value, self.group_name, self.rank)
        return self.recv(self.group_name, self.rank, timeout_s=5) is value

    def send_numbers(self, count: int) -> None:
        for number in range(count):
            self.send(number, self.group_name, 1, tag="a")
            self.send(100 + number, self.group_name, 1, tag="b")

    def receive_numbers(self, count: int) -> tuple[list[int], list[int]]:
        second = [self.recv(self.group_name, 0, tag="b", timeout_s=10) for _ in range(count)]
        first = [self.recv(self.group_name, 0, tag="a", timeout_s=10) for _ in range(count)]
        return first, second

    def share(self, num_floats: int, source: int) -> float:
        import numpy as np

        given = np.ones(num_floats, np.float32) if self.rank == source else None
        array = self.broadcast(given, source=source, timeout_s=10)
        total = float(array.sum())
        array *= self.rank  # must not be seen by the others
        return total

    def doubled(self, array: Any) -> Any:
        array *= 2
        return array

    def receive_any(self, group: str, rank: int) -> Any:
        return self.recv(group, rank, timeout_s=30)

    def send_to(self, group: str, rank: int, timeout_s: float = 10.0) -> None:
        self.send("hello", group, rank, timeout_s=timeout_s)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def meet(self) -> tuple[int, int, int]:
        met = self.rendezvous(timeout_s=10)
        return met.port, met.rank, met.world_size

    def meet_while_another_wants_the_port(self) -> tuple[bool, str]:
        met = self.rendezvous(timeout_s=10)
        is_taken = False
        try:
            socket.create_server((met.host, met.port)).close()
        except OSError:
            is_taken = True
        store = met.open_store(20.0)
        if met.rank == 0:
            store.set("word", "hello")
        word = store.get("word").decode()
        store.add("heard", 1)
        while met.rank == 0 and store.add("heard", 0) < met.world_size:
            time.sleep(0.01)
        return is_taken, word


class Mover(Worker):
    """Counts; takes its count along when it is moved."""

    def __init__(self, refuse_device: int = -1) -> None:
        self.count = 0
        if refuse_device in [device.id for device in self.devices]:
            raise ValueError(f"device {refuse_device} is too hot")
        self.told: list[str] = []
        self.given = threading.Event()

    def increase(self, by: int) -> int:
        self.count += by
        return self.count

    def where(self) -> tuple[int, tuple[int, ...], list[int], int]:
        return self.rank, self.ranks, [device.id for device in self.devices], self.world_size

    def work_until_noticed(self) -> str:
        return "noticed" if self.given.wait(30) else "never"

    def notice(self, notice_s: float) -> None:
        self.given.set()

    def state(self) -> dict[str, Any] | None:
        return {"count": self.count, "pad": bytes(100_000)} if self.count else None

    def restore(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    @classmethod
    def reshard(cls, states: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        return [{"count": sum(state["count"] for state in states), "pad": b""}] * size

    def keep(self, other: WorkerGroup[Mover]) -> None:
        self.other = other

    def ask_kept(self) -> list[Any]:
        return [self.other.ranks, self.other.increase(0).wait(10)]

    def shrink_kept(self) -> None:
        self.other.remove(0)

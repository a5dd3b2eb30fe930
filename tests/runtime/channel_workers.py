"""Producers and consumers that the channel and lock tests launch. They import nothing heavy."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from rill.runtime.channel import Channel, Lease, settle_call
from rill.runtime.context import current
from rill.runtime.worker import Worker, concurrent


class Producer(Worker):
    """Puts numbers, or arrays of a size."""

    def produce(self, channel: Channel, count: int, *, size: int = 0, end: bool = False) -> list[int]:
        numbers = [self.rank * 1_000_000 + n for n in range(count)]
        for number in numbers:
            channel.put(_payload(number, size))
        if end:
            channel.end()
        return numbers

    def produce_until_killed(self, channel: Channel, log: str, size: int = 0) -> None:
        """Writes down what is safely put: after every flush."""
        number = self.rank * 1_000_000 + os.getpid() * 100_000_000
        with open(log, "a") as file:
            while True:
                batch = [number + n for n in range(7)]
                number += 7
                for value in batch:
                    channel.put(_payload(value, size))
                channel.flush()
                file.write("".join(f"{value}\n" for value in batch))
                file.flush()
                time.sleep(0.002)


class Consumer(Worker):
    """Takes until the epoch ends."""

    def consume(self, channel: Channel, delay_s: float = 0.0) -> list[int]:
        taken = []
        for item in channel:
            taken.append(_number(item))
            time.sleep(delay_s)
        return taken

    def relay(self, channel: Channel, onwards: Channel, delay_s: float = 0.0) -> int:
        count = 0
        for item in channel:
            onwards.put(item)
            time.sleep(delay_s)
            count += 1
        return count

    def relay_until(self, channel: Channel, onwards: Channel, bad: int) -> None:
        """Fails at one number."""
        for item in channel:
            onwards.put(item)
            if item == bad:
                raise ValueError(f"{bad} is bad")

    def relay_and_die(self, channel: Channel, onwards: Channel, at: int) -> None:
        """Killed with the output put and the item not finished."""
        for item in channel:
            onwards.put(item)
            if item == at:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)

    def consume_epoch(self, channel: Channel, epoch: int, dies: bool) -> list[int]:
        """Killed, where it is to be, when the broker knows that its loop has ended and its caller does not."""
        taken = [_number(item) for item in channel.of_epoch(epoch)]
        if dies:
            settle_call(current())
            os.kill(os.getpid(), signal.SIGKILL)
        return taken

    async def relay_with_leases(self, channel: Channel, onwards: Channel, bad: int = -1) -> int:
        """All at once, each finished by its own task; `bad` fails the first time."""
        import asyncio

        failed: list[int] = []

        async def one(lease: Lease) -> None:
            async with lease:
                await asyncio.sleep(0.001 * (lease.value % 7))
                await onwards.put_async(lease.value)
                if lease.value == bad and not failed:
                    failed.append(bad)
                    raise ValueError(bad)

        tasks = [asyncio.ensure_future(one(lease)) async for lease in channel.leases()]
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    def pass_on(self, channel: Channel, onwards: Channel) -> int:
        number = int(channel.take(timeout_s=30))
        onwards.put(number)
        return number

    def consume_and_log(self, channel: Channel, log: str, delay_s: float = 0.0) -> int:
        """Writes an item's number and its own process down when it is finished, just before taking the next."""
        count = 0
        with open(log, "ab", buffering=0) as file:
            for item in channel:
                number = _number(item)
                time.sleep(delay_s)
                file.write(f"{number} {os.getpid()}\n".encode())
                count += 1
        return count

    def take_and_die(self, channel: Channel, count: int) -> None:
        for _ in range(count):
            channel.take()
        os.kill(os.getpid(), signal.SIGKILL)

    async def lease_two_end_one_and_die(self, channel: Channel) -> None:
        leases = channel.leases()
        _, second = await anext(leases), await anext(leases)
        second.done()
        while channel.stats()["leased"] > 1:  # until the broker knows
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def take_forever(self, channel: Channel, timeout_s: float) -> None:
        channel.take(timeout_s=timeout_s)


class GpuWorker(Worker):
    """Puts and takes tensors on its own device."""

    def produce(self, channel: Channel, count: int, size: int) -> None:
        import torch

        for n in range(count):
            channel.put({"n": n, "x": torch.full((size,), float(n), device=self.device)})
        torch.cuda.synchronize()
        channel.flush()

    def consume(self, channel: Channel, count: int) -> list[tuple[str, bool, float]]:
        """(device, whether the values are right, seconds) of each item."""
        import torch

        seen = []
        for _ in range(count):
            started_s = time.perf_counter()
            item = channel.take()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started_s
            seen.append((str(item["x"].device), bool((item["x"] == item["n"]).all()), seconds))
        return seen

    def memory(self) -> int:
        import torch

        return int(torch.cuda.memory_allocated())


class Stage(Worker):
    """A worker with memory to bring in and out; it remembers when, and finds out if it is ever not alone."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.events: list[str] = []

    def onload(self) -> None:
        self.events.append("onload")
        for device in self.devices:
            owner = self.folder / f"device-{device.id}"
            others = [p for p in self.folder.glob(f"device-{device.id}-*") if self.group_name not in p.name]
            assert not others, f"{self.group_name} loads while {others} is on device {device.id}"
            owner.with_name(f"{owner.name}-{self.group_name}-{self.rank}").touch()

    def offload(self) -> None:
        self.events.append("offload")
        for device in self.devices:
            (self.folder / f"device-{device.id}-{self.group_name}-{self.rank}").unlink()

    def generate(self, prompts: Channel, rollouts: Channel) -> int:
        count = 0
        with self.device_lock(prompts, rollouts):
            for prompt in prompts:
                rollouts.put(prompt * 10)
                count += 1
        return count

    def train(self, rollouts: Channel) -> int:
        with self.device_lock(rollouts):
            return sum(rollouts)

    @concurrent
    def take_weights(self) -> None:
        """Work of no channel, beside whatever call is under way."""
        with self.device_lock():
            self.events.append("weights")

    @concurrent
    def take_beside(self, channel: Channel) -> int:
        """Waits on a channel without the lock, beside whatever call is under way."""
        return int(channel.take(timeout_s=30))

    def put_all(self, channel: Channel, count: int) -> None:
        with self.device_lock(channel):
            for n in range(count):
                channel.put(n)

    def fail_to_load(self) -> None:
        self.onload = self._fail  # type: ignore[method-assign]
        with self.device_lock():
            raise AssertionError("never reached")

    def _fail(self) -> None:
        raise MemoryError("the model does not fit")

    def hold(self, seconds: float, timeout_s: float = 20.0) -> float:
        with self.device_lock(timeout_s=timeout_s):
            now_s = time.monotonic()
            time.sleep(seconds)
        return now_s

    def hold_and_die(self) -> None:
        with self.device_lock():
            os.kill(os.getpid(), signal.SIGKILL)

    def history(self) -> list[str]:
        return self.events


def _payload(number: int, size: int) -> Any:
    if not size:
        return number
    import numpy as np

    return np.full(size, number, dtype=np.int64)


def _number(item: Any) -> int:
    return item if isinstance(item, int) else int(item[-1])

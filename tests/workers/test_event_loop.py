"""What user code does to the event loop of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import pytest

from rill.workers import event_loop
from rill.workers.env_worker import EnvWorker
from rill.workers.event_loop import EventLoop


def test_what_belongs_to_the_loop_goes_on_in_the_next_epoch() -> None:
    loop, lock, said = EventLoop(), asyncio.Lock(), asyncio.Queue[int]()
    kept: list[asyncio.Task[Any]] = []

    async def server() -> None:
        while True:
            await asyncio.sleep(0)
            said.put_nowait(1)

    async def epoch() -> int:
        if not kept:
            kept.append(asyncio.ensure_future(server()))
        waiter = asyncio.ensure_future(lock.acquire())  # a lock is bound to the loop that first waits for it
        await lock.acquire()
        lock.release()
        await waiter
        lock.release()
        return await said.get()

    assert [loop.run(epoch()) for _ in range(3)] == [1, 1, 1]
    loop.close()
    assert kept[0].cancelled()


def test_a_task_of_the_users_that_quits_ends_nothing_but_itself() -> None:
    loop = EventLoop()

    async def quits() -> None:
        sys.exit(3)

    async def epoch() -> str:
        task = asyncio.ensure_future(quits())
        await asyncio.sleep(0.01)
        with pytest.raises(SystemExit):
            await task
        return "went on"

    assert loop.run(epoch()) == "went on"
    loop.close()


def test_what_does_not_heed_its_cancellation_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "CLOSE_S", 0.05)
    loop = EventLoop()

    async def stays() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async def epoch() -> asyncio.Task[None]:
        task = asyncio.ensure_future(stays())
        await asyncio.sleep(0)
        return task

    task = loop.run(epoch())
    loop.close()
    assert not task.done()


def test_an_environment_worker_has_one_loop_for_all_epochs() -> None:
    seen = []

    class Episodes:
        async def run(self, *_: Any) -> int:
            seen.append(asyncio.get_running_loop())
            return 0

        def close(self) -> None: ...

    class Channel:
        name = "answers"

    worker = EnvWorker.__new__(EnvWorker)
    worker.rank, worker.journal, worker.episodes = 0, None, Episodes()  # type: ignore[assignment]
    worker.loop, worker._answers = EventLoop(), Channel()  # type: ignore[assignment]
    for epoch in range(2):
        worker.run(None, None, (Channel(),), epoch)  # type: ignore[arg-type]
    worker.close()
    assert seen[0] is seen[1]

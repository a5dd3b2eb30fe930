"""The event loop of a worker's environments: the same one for every epoch, so that clients, locks and connections which
they keep go on to work. Owned by the rollout worker and the environment worker, and run on their main thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from rill.envs.places import described

logger = logging.getLogger(__name__)

T = TypeVar("T")
CLOSE_S = 10.0
"""For what still runs to end once it is cancelled; one that does not is left behind."""


class EventLoop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """To its end. A sys.exit() in a task that user code has made reaches who waits for the task, and ends nothing
        else."""
        task = self._loop.create_task(work)
        while True:
            try:
                return self._loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                if task.done():
                    raise
                logger.warning("a task in an environment ended with %s", described(error))

    def call(self, function: Callable[[], object]) -> None:
        """From any thread: between two steps of the loop, or at once where it stands still."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(function)
        else:
            function()

    def close(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.run(_ended(tasks))
        self._loop.close()


async def _ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=CLOSE_S)

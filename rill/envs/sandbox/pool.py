"""Sessions that are ready before they are asked for. A session is used by one owner and thrown away.

Called by environments and the code reward; one pool serves all episodes of a worker, on any number of event loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rill.envs.per_loop import PerLoop
from rill.envs.sandbox.base import Limits, open_sandbox
from rill.envs.sandbox.session import Sandbox, still_living


class SandboxPool:
    """
    >>> async with pool.session() as sandbox:
    ...     await sandbox.exec(["ls"])
    """

    def __init__(
        self,
        kind: str = "bubblewrap",
        limits: Limits | None = None,
        *,
        packages: bool = False,
        num_warm: int | None = None,
        max_open: int = 256,
        **options: Any,
    ) -> None:
        """`num_warm`: sessions started ahead, per event loop. Unset: one for each core. The others: of open_sandbox."""
        self.open = functools.partial(open_sandbox, kind, limits, packages=packages, **options)
        self._loops = PerLoop(lambda: _Shelf(asyncio.Semaphore(max_open)))
        self._num_warm = (os.cpu_count() or 1) if num_warm is None else num_warm

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Sandbox]:
        shelf = self._loops()
        async with shelf.places:
            sandbox = await still_living(shelf.ready) or await self.open()
            self._fill(shelf)
            try:
                yield sandbox
            finally:
                await sandbox.close()

    async def close(self) -> None:
        """Of this event loop. Sessions of a loop that has ended go with their pipes."""
        shelf = self._loops()
        shelf.is_closed = True
        for task in shelf.starting:
            task.cancel()
        for sandbox in shelf.ready:
            await sandbox.close()

    def _fill(self, shelf: _Shelf) -> None:
        while not shelf.is_closed and len(shelf.ready) + len(shelf.starting) < self._num_warm:
            task = asyncio.ensure_future(self._start(shelf))
            shelf.starting.add(task)
            task.add_done_callback(shelf.starting.discard)

    async def _start(self, shelf: _Shelf) -> None:
        with contextlib.suppress(Exception):  # whoever asks next tries again, and is told
            shelf.ready.append(await self.open())


class _Shelf:
    """Of one event loop."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self.places = places
        self.ready: list[Sandbox] = []
        self.starting: set[asyncio.Task[None]] = set()
        self.is_closed = False

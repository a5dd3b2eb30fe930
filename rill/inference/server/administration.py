"""How an administration route acts: the admin key first, then one thing at a time, in a thread, within a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from rill.inference.server.errors import ApiError
from rill.inference.server.state import ServerState, state_of

log = logging.getLogger(__name__)

T = TypeVar("T")


def admin_state(request: Request) -> ServerState:
    """The server's state, for a caller who may administer it."""
    state = state_of(request)
    state.keys.check_admin(request)
    return state


async def act(state: ServerState, what: str, work: Callable[[], T]) -> T:
    """What has begun is never left half done: a caller that leaves or a deadline that passes ends the waiting, not the
    work, and the next one waits for its end."""

    async def alone() -> T:
        async with state.admin_lock:
            return await asyncio.to_thread(work)

    running = asyncio.ensure_future(alone())
    try:
        return await asyncio.wait_for(asyncio.shield(running), state.config.admin_timeout_s)
    except TimeoutError:
        running.add_done_callback(
            lambda done: log.warning("%s ended late: %s", what, done.exception() or "done")
        )
        raise ApiError(
            503, f"{what} did not end within {state.config.admin_timeout_s:g} s and goes on: see /health"
        ) from None

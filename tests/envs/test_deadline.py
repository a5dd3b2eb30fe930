from __future__ import annotations

import asyncio

import pytest

from rill.envs.deadline import Deadline


async def test_what_takes_longer_is_ended_and_what_is_quick_is_not() -> None:
    with Deadline(60.0):
        await asyncio.sleep(0)
    deadline = Deadline(0.01)
    with pytest.raises(TimeoutError), deadline:
        await asyncio.sleep(60)
    assert deadline.is_expired
    await asyncio.sleep(0)  # the task goes on: nothing of the cancellation is left
    with pytest.raises(TimeoutError), Deadline(60.0), Deadline(0.01):
        await asyncio.sleep(60)


async def test_an_error_and_a_cancellation_from_elsewhere_pass_as_they_are() -> None:
    with pytest.raises(KeyError), Deadline(60.0):
        raise KeyError

    async def work() -> None:
        with Deadline(0.01):
            try:
                await asyncio.sleep(60)
            finally:
                asyncio.current_task().cancel()  # type: ignore[union-attr]  # as if another had done so meanwhile

    task = asyncio.ensure_future(work())
    with pytest.raises(asyncio.CancelledError):
        await task


def test_every_loop_has_deadlines_of_its_own() -> None:
    async def late() -> bool:
        with Deadline(0.01):
            await asyncio.sleep(60)
        return False

    for _ in range(2):
        with pytest.raises(TimeoutError):
            asyncio.run(late())

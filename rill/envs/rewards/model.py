"""A reward model: a worker that gives a number for a token sequence.

The worker is somebody else's (a group of model processes placed by the workflow). The workflow connects it under a
name before the first rollout; this reward collects the sequences of one moment and asks for them in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Literal, Protocol

from pydantic import Field

from rill.envs.rewards.base import Isolation, RewardConfig
from rill.envs.rewards.per_loop import PerLoop
from rill.errors import ConfigError
from rill.types import Prompt, TokenIds, Trajectory


class RewardModel(Protocol):
    """What the workflow connects."""

    def __call__(self, sequences: Sequence[TokenIds]) -> Awaitable[Sequence[float]]:
        """One number per sequence, in their order."""
        ...


_CONNECTED: dict[str, RewardModel] = {}


def connect_reward_model(name: str, model: RewardModel) -> None:
    """Make a reward model known in this process. Connecting again under a name replaces it."""
    _CONNECTED[name] = model


def disconnect_reward_model(name: str) -> None:
    _CONNECTED.pop(name, None)


class ModelReward:
    class Config(RewardConfig):
        type: Literal["model"] = "model"
        model: str = "reward"
        """The name it was connected under."""
        max_batch: int = Field(default=64, ge=1)
        """Sequences in one question to the model."""
        wait_ms: float = Field(default=2.0, ge=0)
        """How long to collect sequences for a batch. 0: those of the same moment only."""

    isolation = Isolation.ASYNC

    def __init__(self, config: Config) -> None:
        self.config = config
        self._waiting: PerLoop[list[tuple[TokenIds, asyncio.Future[float]]]] = PerLoop(list)
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        if self.config.model not in _CONNECTED:
            raise ConfigError(
                f"no reward model is connected under {self.config.model!r}: the workflow must call connect_reward_model"
            )
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        waiting = self._waiting()
        waiting.append((trajectory.token_ids, answer))
        if len(waiting) >= self.config.max_batch:
            self._flush()
        elif len(waiting) == 1:
            asyncio.get_running_loop().call_later(self.config.wait_ms / 1000, self._flush)
        return await answer

    def _flush(self) -> None:
        waiting = self._waiting()
        batch = waiting[:]
        waiting.clear()
        if batch:
            task = asyncio.get_running_loop().create_task(self._ask(batch))
            self._tasks.add(task)  # the loop itself keeps only weak references
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, batch: list[tuple[TokenIds, asyncio.Future[float]]]) -> None:
        error: Exception | None = None
        values: Sequence[float] = ()
        try:
            values = await _CONNECTED[self.config.model]([token_ids for token_ids, _ in batch])
            if len(values) != len(batch):
                error = RuntimeError(f"the reward model gave {len(values)} values for {len(batch)} sequences")
        except Exception as raised:  # noqa: BLE001  boundary: handed to every score of the batch
            error = raised
        for k, (_, answer) in enumerate(batch):
            if answer.done():
                continue
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(float(values[k]))

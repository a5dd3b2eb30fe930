"""An environment whose exceptions are data: what it raises becomes a trajectory with `error` set.

Environments are users' code and talk to tools and servers; one that fails in one episode of thousands must not end the
run; nor must one row of the data, or one long talk with a tool, that does not fit the engine's context. Made by
open_environment around every environment. What else rill raises on purpose (an engine that failed) passes, as does a
cancelled episode.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rill.data.chat import PromptEncoder
from rill.envs.trajectory_builder import TrajectoryBuilder
from rill.errors import RillError, TooLongError
from rill.types import Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.envs.base import Environment, Policy

logger = logging.getLogger(__name__)

MAX_LOGGED = 20
"""Failures whose traceback goes to the log; all of them are counted as `rollout/errors`."""


class GuardedEnvironment:
    def __init__(self, environment: Environment, tokenizer: PreTrainedTokenizerBase) -> None:
        self._environment = environment
        self._encoder = PromptEncoder(tokenizer)
        self._num_failed = 0

    async def rollout(
        self, prompt: Prompt, policy: Policy, *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        try:
            return await self._environment.rollout(
                prompt, policy, trajectory_id=trajectory_id, group_id=group_id, sampling=sampling
            )
        except Exception as error:  # boundary: an environment is a user's code and may raise anything
            if isinstance(error, RillError) and not isinstance(error, TooLongError):
                raise
            self._num_failed += 1
            if self._num_failed <= MAX_LOGGED:
                logger.warning("episode %s failed", trajectory_id, exc_info=True)
            episode = TrajectoryBuilder(
                prompt, self._encoder.encode(prompt), trajectory_id=trajectory_id, group_id=group_id
            )
            return episode.finish(error=f"environment: {type(error).__name__}: {error}")

    def close(self) -> None:
        self._environment.close()

"""A policy that says what it is told to, and how to play an episode with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rill.envs.base import ENVIRONMENTS, Environment, open_environment
from rill.envs.episode import run_episode
from rill.inference.base import Completion
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Episode, Picture, Prompt, SamplingParams, StopReason, TokenIds

QUESTION = Prompt(id="p", text="27+58=", answer="85")


class Scripted:
    """Replies in order, or whatever a function makes of the text it is shown."""

    def __init__(
        self,
        *replies: str | Callable[[str], str],
        stop: StopReason = StopReason.EOS,
        tokenizer: Any = None,
        ends: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer or build_char_tokenizer()
        self.replies = list(replies)
        self.stop = stop
        self.ends = ends
        """The token that ends a reply; None: the tokenizer's own."""
        self.seen: list[list[int]] = []
        self.names: list[str] = []
        self.sampling: list[SamplingParams] = []
        self.models: list[str | None] = []
        self.pictures: list[tuple[Picture, ...]] = []

    async def generate(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        name: str,
        model: str | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Completion:
        self.seen.append(token_ids.tolist())
        self.names.append(name)
        self.sampling.append(sampling)
        self.models.append(model)
        self.pictures.append(pictures)
        reply = self.replies[0] if callable(self.replies[0]) else self.replies.pop(0)
        text = reply if isinstance(reply, str) else reply(self.tokenizer.decode(token_ids.tolist()))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.stop is StopReason.EOS:
            ids.append(
                self.tokenizer.eos_token_id
                if self.ends is None
                else self.tokenizer.convert_tokens_to_ids(self.ends)
            )
        return completion(ids, self.stop)


def completion(ids: list[int], stop: StopReason = StopReason.EOS, version: int = 3) -> Completion:
    return Completion(
        request_id="r",
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -0.5, dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
        stop_reason=stop,
    )


def environment(name: str = "single_turn", tokenizer: Any = None, **settings: Any) -> Environment:
    config = ENVIRONMENTS.load(name).Config.model_validate({"type": name, **settings})
    return open_environment(config, tokenizer or build_char_tokenizer())


def playing(run: Callable[..., Any], tokenizer: Any = None, **settings: Any) -> Environment:
    """An environment around a coroutine function of (task, agents)."""

    class Playing(Environment):
        async def run(self, task: Prompt, agents: Any) -> Any:
            return await run(task, agents)

    config = Environment.Config.model_validate({"type": "tests:Playing", **settings})
    return Playing(config, tokenizer or build_char_tokenizer())


async def play(env: Environment, policy: Any, prompt: Prompt = QUESTION, **options: Any) -> Episode:
    try:
        return await run_episode(
            env,
            prompt,
            policy,
            episode_id="e",
            group_id="g",
            sampling=options.pop("sampling", SamplingParams()),
            **options,
        )
    finally:
        env.close()

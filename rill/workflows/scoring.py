"""Evaluation outside a run: one engine in this process, a task's held-out problems, pass@k. Behind `rill eval`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from rill.config import Config, OneOf, PartConfig
from rill.data.base import DATASETS, Split, open_indexed, prompts_of
from rill.envs.base import ENVIRONMENTS, Environment, open_environment
from rill.envs.episode import run_episode
from rill.inference.base import ENGINES, Engine
from rill.models.loading import ModelConfig, load_tokenizer
from rill.types import Prompt, SamplingParams, TokenIds
from rill.workflows.config import SamplingConfig, native_unless_named
from rill.workflows.policy import EngineGate, PolicyClient


class ScoringConfig(Config):
    """What to evaluate, on what, how."""

    model: ModelConfig
    engine: Annotated[PartConfig, OneOf(ENGINES), BeforeValidator(native_unless_named)] = Field(
        default_factory=dict, validate_default=True
    )
    """Its model is the one above unless it names its own."""
    data: Annotated[PartConfig, OneOf(DATASETS)]
    split: Split = Split.HELD_OUT
    env: Annotated[PartConfig, OneOf(ENVIRONMENTS)]
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    num_prompts: int = Field(256, ge=1)
    samples: int = Field(1, ge=1)
    """Completions per prompt."""
    seed: int = 0

    handed_down = {"engine.model": "model"}

    @model_validator(mode="after")
    def _samples_differ(self) -> ScoringConfig:
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ValueError("several samples at temperature 0 are all the same: set sampling.temperature")
        return self


def score(config: ScoringConfig, on_done: Callable[[int, int], None] | None = None) -> list[list[float]]:
    """Rewards: one row to a prompt. `on_done(finished, total)` is called after every completion."""
    prompts = list(prompts_of(open_indexed(config.data, config.split), config.num_prompts))
    environment = open_environment(config.env, load_tokenizer(config.model))
    engine: Engine = ENGINES.load(config.engine.type)(config.engine)
    try:
        sampling = config.sampling.params()
        return asyncio.run(
            rewards_of(
                engine, environment, list(enumerate(prompts)), sampling, config.samples, config.seed, on_done
            )
        )
    finally:
        environment.close()
        engine.close()


async def rewards_of(
    engine: Engine,
    environment: Environment,
    numbered: Sequence[tuple[int, Prompt]],
    sampling: SamplingParams,
    num_samples: int,
    seed: int,
    on_done: Callable[[int, int], None] | None = None,
) -> list[list[float]]:
    """Put every prompt to the engine `num_samples` times, all at once. Its number seeds it, whichever engine it is put
    to; ids of a user's rows may repeat."""
    policy = PolicyClient(EngineGate(engine), seed=seed, decode=_never_cut)
    num_done = 0

    async def one(group: str, prompt: Prompt, sample: int) -> float:
        nonlocal num_done
        name = f"{group}/{sample}"
        episode = await run_episode(
            environment, prompt, policy.episode(name, {}), episode_id=name, group_id=group, sampling=sampling
        )
        num_done += 1
        if on_done is not None:
            on_done(num_done, len(numbered) * num_samples)
        return episode.reward if episode.failure is None else float("nan")

    flat = await asyncio.gather(
        *(one(f"eval/{number}", prompt, n) for number, prompt in numbered for n in range(num_samples))
    )
    return [list(flat[i : i + num_samples]) for i in range(0, len(flat), num_samples)]


def _never_cut(token_ids: TokenIds) -> str:
    raise AssertionError(f"an evaluation is never stopped, but {len(token_ids)} tokens are to be continued")

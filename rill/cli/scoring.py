"""Evaluation outside a run: one engine in this process, any number of data sets. Behind `rill eval`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from rill.config import OneOf, PartConfig
from rill.data.base import DATASETS, Split, open_indexed
from rill.envs.base import ENVIRONMENTS, Environment, open_environment
from rill.envs.episode import run_episode
from rill.envs.rewards.runner import response_text
from rill.errors import DataError
from rill.inference.base import ENGINES, Engine
from rill.inference.policy import EngineGate, PolicyClient
from rill.models.loading import ModelConfig, load_tokenizer
from rill.models.pictures import load_pictures
from rill.telemetry.evaluations import Answer
from rill.telemetry.rollout_log import RolloutLog
from rill.types import Episode, Group, Prompt, SamplingParams, TokenIds
from rill.workers.config import EvalSamplingConfig, EvalSetConfig, SamplingConfig, native_unless_named
from rill.workflows.evaluation import read_prompts

MAX_TRANSCRIPTS = 256
"""Groups of an evaluation that the rollout viewer shows; every answer is in its file."""


class ScoringConfig(EvalSamplingConfig):
    """What `rill eval` evaluates, on what, how."""

    model: ModelConfig
    engine: Annotated[PartConfig, OneOf(ENGINES), BeforeValidator(native_unless_named)] = Field(
        default_factory=lambda: {"type": "native"}, validate_default=True
    )
    """Its model is the one above unless it names its own."""
    data: Annotated[PartConfig, OneOf(DATASETS)]
    split: Split | None = None
    """Unset: the held-out side where the data has one, else all of it."""
    env: Annotated[PartConfig, OneOf(ENVIRONMENTS)]
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    num_prompts: int = Field(256, ge=0)
    """The first of them. 0: only the sets."""
    sets: tuple[EvalSetConfig, ...] = ()
    """Evaluated beside it."""
    seed: int = 0

    handed_down = {"engine.model": "model", "temperature": "sampling.temperature"}

    def all_sets(self) -> list[EvalSetConfig]:
        if self.num_prompts == 0:
            return list(self.sets)
        return [*self.own_set(self.data, self.split or _held_out_if_any(self.data)), *self.sets]


def score(
    config: ScoringConfig,
    on_done: Callable[[int, int], None] | None = None,
    *,
    transcripts: tuple[Path, str, int] | None = None,
) -> list[Answer]:
    """All answers, set by set and prompt by prompt. `on_done(finished, total)` is called after every completion.
    `transcripts`: a run's folder, a name, under which the first groups are kept for the rollout viewer, and the version
    of the weights."""
    sets = [(chosen, read_prompts(chosen)) for chosen in config.all_sets()]
    tokenizer, pictures = load_tokenizer(config.model), load_pictures(config.model)
    engine: Engine = ENGINES.load(config.engine.type)(config.engine)
    answers: list[Answer] = []
    log = None if transcripts is None else RolloutLog(*transcripts[:2], tokenizer, MAX_TRANSCRIPTS)
    try:
        for chosen, prompts in sets:
            environment = open_environment(chosen.env or config.env, tokenizer, pictures)
            sampling = chosen.params(config.sampling)
            episodes = asyncio.run(
                episodes_of(engine, environment, prompts, sampling, chosen.samples, config.seed, on_done)
            )
            environment.close()
            for place, (prompt, group) in enumerate(zip(prompts, episodes, strict=True)):
                answers += [_answer(chosen.name, prompt, episode) for episode in group]
                if log is not None and transcripts is not None:
                    said = tuple(sample for episode in group for sample in episode.samples)
                    kept = Group(id=group[0].group_id, prompt=prompt, trajectories=said)
                    log.write_evaluation(kept, place, f"{transcripts[1]} {chosen.name}", transcripts[2])
    finally:
        engine.close()
        if log is not None:
            log.close()
    return answers


def _answer(name: str, prompt: Prompt, episode: Episode) -> Answer:
    asked = prompt.text or "\n".join(f"{m.role}: {m.content}" for m in prompt.messages)
    return Answer(
        set=name,
        prompt_id=prompt.id,
        prompt=asked,
        expected=prompt.answer,
        response=response_text(episode.samples[0]),
        reward=episode.reward if episode.failure is None else None,
        error=episode.error,
        num_tokens=sum(sample.num_sampled for sample in episode.samples),
        metrics={
            "read_tokens": float(sum(s.num_tokens - s.num_sampled for s in episode.samples)),
            **{
                name: value for name, value in episode.metrics.items() if name not in ("samples", "rewritten")
            },
        },
    )


def _held_out_if_any(data: PartConfig) -> Split:
    try:
        open_indexed(data, Split.HELD_OUT)
    except DataError:
        return Split.TRAIN
    return Split.HELD_OUT


async def episodes_of(
    engine: Engine,
    environment: Environment,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    num_samples: int,
    seed: int,
    on_done: Callable[[int, int], None] | None = None,
) -> list[list[Episode]]:
    """Put every prompt to the engine `num_samples` times, all at once. Its number seeds it, whichever engine it is put
    to; ids of a user's rows may repeat."""
    policy = PolicyClient(EngineGate(engine), seed=seed, decode=_never_cut)
    num_done = 0

    async def one(group: str, prompt: Prompt, sample: int) -> Episode:
        nonlocal num_done
        name = f"{group}/{sample}"
        episode = await run_episode(
            environment, prompt, policy.episode(name, {}), episode_id=name, group_id=group, sampling=sampling
        )
        num_done += 1
        if on_done is not None:
            on_done(num_done, len(prompts) * num_samples)
        return episode

    flat = await asyncio.gather(
        *(
            one(f"eval/{number}", prompt, n)
            for number, prompt in enumerate(prompts)
            for n in range(num_samples)
        )
    )
    return [list(flat[i : i + num_samples]) for i in range(0, len(flat), num_samples)]


def _never_cut(token_ids: TokenIds) -> str:
    raise AssertionError(f"an evaluation is never stopped, but {len(token_ids)} tokens are to be continued")

"""A weighted sum of rewards. The runner takes it apart, so every term has its own deadline and its own part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rill.config import Config, OneOf, PartConfig
from rill.envs.rewards.base import REWARDS, InlineReward, RewardConfig
from rill.errors import ConfigError
from rill.types import Prompt, Trajectory


class TermConfig(Config):
    reward: Annotated[PartConfig, OneOf(REWARDS)]
    weight: float = 1.0
    """0: scored and reported, without effect on the reward."""


class MixReward(InlineReward):
    class Config(PartConfig):
        type: Literal["mix"] = "mix"
        terms: tuple[TermConfig, ...] = Field(min_length=1)
        """Each with its own name and time limit. A mix may hold mixes: weights multiply."""

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        raise AssertionError("the runner takes a mix apart; it is never scored whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One reward of a run with its share in the sum."""

    label: str
    weight: float
    config: RewardConfig


def flatten(config: PartConfig, weight: float = 1.0) -> list[Term]:
    """The terms of a reward: one for a plain reward, all of them for a mix. Labels are made unique."""
    terms = _flatten(config, weight)
    seen: dict[str, int] = {}
    unique = []
    for term in terms:
        count = seen[term.label] = seen.get(term.label, 0) + 1
        label = term.label if count == 1 else f"{term.label}_{count}"
        unique.append(Term(label=label, weight=term.weight, config=term.config))
    return unique


def _flatten(config: PartConfig, weight: float) -> list[Term]:
    if isinstance(config, MixReward.Config):
        return [leaf for term in config.terms for leaf in _flatten(term.reward, weight * term.weight)]
    if not isinstance(config, RewardConfig):
        raise ConfigError(
            f"reward {config.type!r}: its Config must derive from rill.envs.rewards.RewardConfig"
        )
    return [Term(label=config.label, weight=weight, config=config)]

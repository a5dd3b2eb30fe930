"""A small schema with everything a real one has: nested tables, chosen parts, lists of them, unions."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rill.config import Config, OneOf, PartConfig
from rill.registry import Registry

ENGINES = Registry(
    "engine", {"native": "tests.config.parts:NativeEngine", "remote": "tests.config.parts:RemoteEngine"}
)


class NativeEngine:
    class Config(PartConfig):
        type: Literal["native"] = "native"
        block_size: int = Field(16, ge=1)
        """Tokens in a block."""


class RemoteEngine:
    class Config(PartConfig):
        type: Literal["remote"] = "remote"
        address: str
        """Where the server is."""


class Schedule(StrEnum):
    CONSTANT = "constant"
    COSINE = "cosine"


class Trainer(Config):
    learning_rate: float = Field(1e-3, gt=0)
    """Per step."""
    schedule: Schedule = Schedule.CONSTANT
    warmup: int | None = None
    """Steps. Unset: off."""

    @model_validator(mode="after")
    def _fits(self) -> Trainer:
        if self.schedule is Schedule.COSINE and self.warmup is None:
            raise ValueError("cosine needs `warmup`")
        return self


class SmallRecipe(Config):
    workflow: str
    steps: int
    """How many steps to train."""
    trainer: Trainer = Trainer()
    engine: Annotated[PartConfig, OneOf(ENGINES)] = NativeEngine.Config()
    judges: list[Annotated[PartConfig, OneOf(ENGINES)]] = []
    tags: dict[str, int] = {}


class SmallWorkflow:
    Config = SmallRecipe

"""How many engines a run should have: by a schedule, or by what there is to do; the fleet sees to it."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Annotated, Self

from pydantic import Field, model_validator

from rill.config import Config
from rill.errors import RillError

log = logging.getLogger(__name__)


class ElasticConfig(Config):
    """[elastic]: how many engines there are. Unset: those of the placement, and who is told to join or leave. Engines
    join on devices that no part of the run has; where there are none left, as many stay as there are."""

    schedule: dict[int, Annotated[int, Field(ge=1)]] = {}
    """Engines from a step on, e.g. { 100 = 4, 500 = 2 }. Empty: off."""
    prompts_per_engine: int = Field(0, ge=0)
    """One engine for so many prompts that wait or are being answered: more join at once where there are more, and one
    leaves where fewer would have done for `idle_s`. 0: off."""
    min_engines: int = Field(1, ge=1)
    """With prompts_per_engine."""
    max_engines: int = Field(0, ge=0)
    """With prompts_per_engine. 0: as many as have a device."""
    idle_s: float = Field(60.0, ge=0)
    """Seconds."""

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.schedule and self.prompts_per_engine:
            raise ValueError("schedule and prompts_per_engine both say how many engines there are: set one")
        if 0 < self.max_engines < self.min_engines:
            raise ValueError(f"max_engines = {self.max_engines} is below min_engines = {self.min_engines}")
        return self


class Scaler:
    """How many engines there should be."""

    def __init__(self, config: ElasticConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._since_s = clock()
        self._seen: deque[tuple[float, int]] = deque()
        """When it was looked, and the engines that would have done."""
        self._peak = 0
        """The most of these since engines last could come or go: a synchronous run ends every step with few prompts."""
        self._most = config.max_engines or 1 << 30
        """Lowered to what there is room for."""
        self._step = 0

    def look(self, num_prompts: Callable[[], int]) -> None:
        """So many wait or are being answered, in the middle of a step."""
        if not self.config.prompts_per_engine:
            return
        needed = math.ceil(num_prompts() / self.config.prompts_per_engine)
        needed, now_s = max(self.config.min_engines, needed), self._clock()
        self._peak = max(self._peak, needed)
        self._seen.append((now_s, needed))
        while self._seen[0][0] < now_s - self.config.idle_s:
            self._seen.popleft()

    def scale(
        self,
        step: int,
        ranks: Callable[[], tuple[int, ...]],
        join: Callable[[str], str],
        leave: Callable[[int], str],
    ) -> None:
        """Come to as many engines as there should be. `step`: the newest that is done, at least."""
        self._step = max(self._step, step)
        while (wanted := self._wanted(len(ranks()))) != len(ranks()):
            try:
                join("") if wanted > len(ranks()) else leave(max(ranks()))
            except RillError as error:
                log.warning("%d engines, %d are wanted: %s", len(ranks()), wanted, str(error).splitlines()[0])
                self._most = len(ranks())
                break
        self._peak = 0

    def _wanted(self, num_engines: int) -> int:
        config = self.config
        due = [at for at in config.schedule if at <= self._step]
        if due:
            return min(config.schedule[max(due)], self._most)
        if not self._seen:
            return num_engines
        if self._peak > num_engines:
            return max(num_engines, min(self._peak, self._most))
        highest = max(self._peak, *(needed for _, needed in self._seen))
        is_idle = highest < num_engines and self._clock() - self._since_s >= config.idle_s
        self._since_s = self._clock() if is_idle else self._since_s
        return num_engines - 1 if is_idle else num_engines

"""Engines that come and go: by what people ask of a run that is running, by a schedule, or by how much there is to do.

    rill engine join RUN ──▶ RUN/requests/ID.json ──▶ the driver acts ──▶ RUN/requests/ID.answer ──▶ printed
    [elastic] ──▶ Scaler: how many there should be ──▶ the driver acts

The driver looks between two steps and, where engines run ahead, every second (fleet.py). A request has a deadline,
past which nobody acts on it: what a terminal that died has left does nothing when the run is resumed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from rill.config import Config
from rill.errors import RillError, RunError, UserError
from rill.telemetry.run import Run, RunStatus, write_atomically

log = logging.getLogger(__name__)

FOLDER = "requests"
POLL_S = 0.1

Join = Callable[[str], str]
"""Engines, on these devices."""
Leave = Callable[[int], str]
"""An engine, by its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    devices: str = ""
    """Where engines are to join. Empty: one, where no group has devices."""
    leaving: int | None = None
    """The rank that is to leave; None: engines join."""
    until_s: float
    """Seconds since the epoch."""


def ask(run: Run, *, devices: str = "", leaving: int | None = None, timeout_s: float) -> str:
    """What the run has done. UserError: it runs not, or refuses; RunError: it does not answer."""
    request = Request(devices=devices, leaving=leaving, until_s=time.time() + timeout_s)
    folder = run.path / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{run.path} has no engines that come and go: it is another workflow's, or still starting"
        )
    path = folder / f"{time.time_ns()}-{os.getpid()}.json"
    reply = path.with_suffix(".answer")
    write_atomically(path, json.dumps(asdict(request)))
    try:
        while time.time() < request.until_s:
            if (status := run.state().status) is not RunStatus.RUNNING:
                raise UserError(
                    f"{run.path} is not running ({status.value}): engines join and leave a live run"
                )
            if reply.exists():
                answer: dict[str, str] = json.loads(reply.read_text(encoding="utf-8"))
                if "refused" in answer:
                    raise UserError(answer["refused"])
                return answer["done"]
            time.sleep(POLL_S)
    finally:
        path.unlink(missing_ok=True)
        reply.unlink(missing_ok=True)
    raise RunError(
        f"{run.path} has not answered within {timeout_s:g} s: it starts, trains, or is stuck (rill doctor {run.name})"
    )


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
        self.most = config.max_engines or 1 << 30
        """Lowered to what there is room for."""

    def look(self, num_prompts: int) -> None:
        """So many wait or are being answered."""
        needed = math.ceil(num_prompts / self.config.prompts_per_engine)
        now_s = self._clock()
        self._seen.append((now_s, max(self.config.min_engines, needed)))
        while self._seen[0][0] < now_s - self.config.idle_s:
            self._seen.popleft()

    def wanted(self, step: int, num_engines: int) -> int:
        config = self.config
        due = [at for at in config.schedule if at <= step]
        if due:
            return min(config.schedule[max(due)], self.most)
        if not self._seen:
            return num_engines
        newest, highest = self._seen[-1][1], max(needed for _, needed in self._seen)
        if newest > num_engines:
            return max(num_engines, min(newest, self.most))
        is_idle = highest < num_engines and self._clock() - self._since_s >= config.idle_s
        self._since_s = self._clock() if is_idle else self._since_s
        return num_engines - 1 if is_idle else num_engines


class Door:
    """The driver's end. `berth`: where engines may join, for the devices that were asked for; `changed`: they have."""

    def __init__(
        self,
        run_dir: Path,
        berth: Callable[[str], str],
        changed: Callable[[], None],
        scaler: Scaler | None = None,
        num_prompts: Callable[[], int] = lambda: 0,
    ) -> None:
        """`num_prompts`: that wait or are being answered."""
        self._scaler = scaler
        self._num_prompts = num_prompts
        self._step = 0
        self._folder = run_dir / FOLDER
        self._folder.mkdir(exist_ok=True)
        self.berth = berth
        self.changed = changed

    def attend(self, join: Join, leave: Leave) -> None:
        """Act on every request. What cannot be done is refused, and the run goes on."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                request = Request(**json.loads(path.read_text(encoding="utf-8")))
                path.unlink()
            except (OSError, ValueError, TypeError):  # taken back meanwhile, or not of `ask`
                path.unlink(missing_ok=True)
                continue
            if time.time() > request.until_s:
                continue
            try:
                is_join = request.leaving is None
                answer = {"done": join(request.devices) if is_join else leave(request.leaving or 0)}
            except RillError as error:
                answer = {"refused": str(error).splitlines()[0]}
            write_atomically(path.with_suffix(".answer"), json.dumps(answer))

    def look(self) -> None:
        """How much there is to do, in the middle of a step."""
        if self._scaler is not None and self._scaler.config.prompts_per_engine:
            self._scaler.look(self._num_prompts())

    def scale(self, step: int, ranks: Callable[[], tuple[int, ...]], join: Join, leave: Leave) -> None:
        """Come to as many engines as there should be. `step`: the newest that is done, at least."""
        if self._scaler is None:
            return
        self._step = max(self._step, step)
        while (wanted := self._scaler.wanted(self._step, len(ranks()))) != len(ranks()):
            try:
                join("") if wanted > len(ranks()) else leave(max(ranks()))
            except RillError as error:
                log.warning("%d engines, %d are wanted: %s", len(ranks()), wanted, str(error).splitlines()[0])
                self._scaler.most = len(ranks())
                return

"""Engines that come and go: by what people ask of a run that is running, by a schedule, or by how much there is to do.

    rill engine join RUN ──▶ rill.telemetry.requests ──▶ the driver acts, and answers
    [elastic] ──▶ rill.planning.elastic: how many there should be ──▶ the driver acts

The driver looks between two steps and, where engines run ahead, every second (fleet.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from rill.errors import RillError
from rill.planning.elastic import Scaler
from rill.telemetry.requests import answer_all, open_requests

log = logging.getLogger(__name__)

Join = Callable[[str], str]
"""Engines, on these devices."""
Leave = Callable[[int], str]
"""An engine, by its rank."""


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
        self._run_dir = run_dir
        open_requests(run_dir)
        self.berth = berth
        self.changed = changed

    def attend(self, join: Join, leave: Leave) -> None:
        """Do what people have asked for."""
        answer_all(
            self._run_dir,
            lambda asked: join(asked.devices) if asked.leaving is None else leave(asked.leaving),
        )

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

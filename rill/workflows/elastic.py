"""Engines that come and go: by what people ask of a run that is running, by a schedule, or by how much there is to do.

    rill engine join RUN ──▶ RUN/requests/ID.json ──▶ the driver acts ──▶ RUN/requests/ID.answer ──▶ printed
    [elastic] ──▶ rill.planning.elastic: how many there should be ──▶ the driver acts

The driver looks between two steps and, where engines run ahead, every second (fleet.py). A request has a deadline,
past which nobody acts on it: what a terminal that died has left does nothing when the run is resumed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rill.errors import RillError, RunError, UserError
from rill.planning.elastic import Scaler
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

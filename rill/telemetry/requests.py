"""What people ask of a run that is running, through its folder, from any terminal that sees it.

    ask ──▶ RUN/requests/ID.json ──▶ the driver acts (answer_all) ──▶ RUN/requests/ID.answer ──▶ returned

A request has a deadline, past which nobody acts on it: what a terminal that died has left does nothing when the run is
resumed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from rill.errors import RillError, RunError, UserError
from rill.telemetry.run import Run, RunStatus, write_atomically

FOLDER = "requests"
POLL_S = 0.1


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
    deadline_s = time.monotonic() + timeout_s
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
        while time.monotonic() < deadline_s:
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


def open_requests(run_dir: Path) -> None:
    """By the driver: from now on it can be asked."""
    (run_dir / FOLDER).mkdir(exist_ok=True)


def answer_all(run_dir: Path, act: Callable[[Request], str]) -> None:
    """Act on every request. What cannot be done is refused, and the run goes on."""
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        try:
            request = msgspec.json.decode(path.read_bytes(), type=Request)
            path.unlink()
        except (OSError, ValueError):  # taken back meanwhile, or not of `ask`
            path.unlink(missing_ok=True)
            continue
        if time.time() > request.until_s:
            continue
        try:
            answer = {"done": act(request)}
        except RillError as error:
            answer = {"refused": str(error).splitlines()[0]}
        with suppress(OSError):  # on a full disk: who asked gives up at the deadline
            write_atomically(path.with_suffix(".answer"), json.dumps(answer))

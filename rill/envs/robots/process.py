"""Simulators in a process of their own: what crashes or hangs there costs its own episodes and nothing else.

    parent: SimulatorProcess ── ("play", chunks) ──▶ child: Bank ── {slot: Played} ──▶ parent

One socket, one request at a time. A child that is gone, or has not answered in time, is killed and started again, and
the caller gets SimulatorLostError: the episodes it played are lost and must be counted. Children end with their parent,
whatever ends that: the kernel sees to it, which is why they are started from the thread that lives as long as the
process (`restart`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rill.config import PartConfig
from rill.envs.robots.bank import Bank, Begin, Played
from rill.envs.robots.base import SIMULATORS
from rill.errors import ConfigError, RunError, UserError
from rill.types import Floats, RobotSpec

PR_SET_PDEATHSIG = 1
START_S = 120.0
"""For a child to import its library and open its simulators."""
END_S = 5.0


class SimulatorLostError(RunError):
    """The process of some simulators died or hung. It was killed; `restart` brings a new one."""


class SimulatorProcess:
    """`size` simulators behind a socket. Not for several threads at once."""

    def __init__(self, config: PartConfig, size: int, *, timeout_s: float) -> None:
        """`timeout_s`: for a chunk of all simulators."""
        self._config = config
        self._size = size
        self._timeout_s = timeout_s
        self._spec: RobotSpec | None = None
        self.num_restarts = 0
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def spec(self) -> RobotSpec:
        """Waits until the simulators are open. ConfigError: they cannot be."""
        if self._spec is None:
            self._spec = self._answer(START_S)
        return self._spec

    def reset(self, begins: Mapping[int, Begin]) -> dict[int, Played]:
        return self._ask("reset", begins)

    def play(self, chunks: Mapping[int, Floats]) -> dict[int, Played]:
        return self._ask("play", chunks)

    def show(self, slots: Mapping[int, int]) -> dict[int, Played]:
        return self._ask("show", slots)

    def restart(self) -> None:
        """After SimulatorLostError, from the thread that made this object."""
        self._start()
        self.num_restarts += 1

    def close(self) -> None:
        self._connection.close()  # the child reads the end and goes
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    # --- inside -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = str(Path(__file__).parents[3])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._connection.send((type(self._config).__module__, self._config.model_dump(), self._size))
        self._spec = None

    def _ask(self, what: str, asked: Mapping[int, Any]) -> dict[int, Played]:
        if not asked:
            return {}
        self.spec()
        try:
            self._connection.send((what, dict(asked)))
        except OSError as error:
            raise self._lost(f"died ({error})") from error
        played: dict[int, Played] = self._answer(self._timeout_s)
        return played

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._connection.poll(timeout_s):
                raise self._lost(f"did not answer within {timeout_s:.0f} s")
            kind, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost("died") from error
        if kind == "error":
            raise ConfigError(value)
        return value

    def _lost(self, how: str) -> SimulatorLostError:
        with contextlib.suppress(OSError):
            self._child.kill()
        code = self._child.wait()
        self._connection.close()
        return SimulatorLostError(
            f"the process of {self._size} {self._config.type!r} simulators {how} (exit code {code})"
        )


def serve(connection: Connection) -> None:
    """The child's life."""
    module, values, size = connection.recv()
    try:
        __import__(module)
        config = SIMULATORS.load(values["type"]).Config(**values)
        bank = Bank(config, size)
    except Exception as error:  # noqa: BLE001  boundary: told by the parent
        connection.send(("error", f"{error}" if isinstance(error, UserError) else f"{error!r}"))
        return
    connection.send(("spec", bank.spec))
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            what, asked = connection.recv()
            try:
                play: Callable[[Any], dict[int, Played]] = getattr(bank, what)  # reset, play, show
                played = play(asked)
            except UserError as error:
                connection.send(("error", str(error)))
                continue
            connection.send(("played", played))
    bank.close()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process in order
    serve(Connection(int(sys.argv[1])))

"""The process of another rank of a tensor-parallel engine: does what rank 0 says, in that order (followers.py).

It holds its part of the model and of the cache, and neither schedules nor samples. It ends when it is told to, when
what it does fails, which it says first, and when rank 0's process is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rill.errors import RillError
from rill.inference.native.batch import StepBatch, changed_places
from rill.inference.native.engine import NativeEngine
from rill.inference.native.followers import HERE, HOST, READY, STEP_TIMEOUT_S, Seat
from rill.inference.native.runners import context_limit, load_runner
from rill.runtime.transfer import collective

log = logging.getLogger(__name__)


class Follower:
    def __init__(self, seat: Seat) -> None:
        config = NativeEngine.Config.model_validate(seat.config)
        store = collective.open_store(HOST, seat.port, is_master=False, timeout_s=STEP_TIMEOUT_S)
        self._group = seat.join(store)
        self._runner, _ = load_runner(config, None, group=self._group)
        self._runner.enter_thread()
        self._targets = self._runner.weight_targets()
        limit = context_limit(self._runner.model.config, config.max_context)
        size = (self._runner.max_num_seqs, -(-limit // config.block_size))
        self._tables = np.zeros(size, dtype=np.int32)

    def do(self, method: str, args: tuple[Any, ...]) -> None:
        if method == "follow":
            self._runner.follow([self._seated(step) for step in args[0]])
        elif method == "receive":
            self._targets.receive(*args)
        elif method == "free_bytes":
            self._group.least(self._runner.free_bytes())
        else:
            getattr(self._runner, method)(*args)

    def _seated(self, step: StepBatch) -> StepBatch:
        """With whole tables, which this rank keeps up to date."""
        self._tables[changed_places(step.table_updates)] = step.tables
        step.tables = self._tables
        return step


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which ends this process in order
    threading.Thread(target=_end_with_leader, daemon=True).start()
    connection = Connection(descriptor)
    seat: Seat = connection.recv()
    try:
        connection.send(HERE)
        follower = Follower(seat)
        connection.send(READY)
        while (message := connection.recv())[0] != "end":
            follower.do(*message)
    except Exception as error:  # boundary: told by rank 0, which lost the step too
        if not isinstance(error, RillError | EOFError):
            log.exception("rank %d ends", seat.rank)
        with suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)  # nothing here is worth the seconds that an orderly end takes


def _end_with_leader() -> None:
    """Whatever the main thread waits for, a collective on a device too."""
    sys.stdin.buffer.read()
    os._exit(1)

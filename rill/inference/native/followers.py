"""Several processes that run one model (tensor parallelism): rank 0 starts the others and leads them.

    rank 0   engine, scheduler, sampler ─► LeadingRunner ─► its own runner ──┐
                                               │ socket: what to do          │ group: tokens, partial sums, weights
    rank 1                                     └────────► Follower ─► runner ┘

Rank 0 alone decides and samples. It tells the others each step's small arrays (positions, cache slots, table changes)
over a socket and then computes the step with them; a scheduler on every rank would have to be fed the same commands at
the same moments, and would have to agree for ever. Token ids come from rank 0 in the group, inside the step, because
on CUDA the host does not know them yet. Everything else that changes a runner (cache, weights, graphs) is told the same
way, in the same order.

A follower holds its part of the model and of the cache, and neither schedules nor samples. One that dies fails whatever
waits for it, by rank and process (`failure`), and ends the engine; a leader that dies ends its followers, whose
standard input closes with it. Every wait for another rank has a deadline.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from rill.errors import ConfigError, EngineDiedError, EngineError, RillError
from rill.inference.commands import MOVE_TIMEOUT_S
from rill.inference.native.batch import StepBatch, changed_places
from rill.inference.native.model_runner import ModelRunner, PendingTurn, TurnResult
from rill.inference.native.runners import device_of, load_runner
from rill.inference.native.self_check import check_runner
from rill.inference.native.weight_update import WeightTargets
from rill.models.decode.shards import check_divides
from rill.models.decode.tensor_group import TensorGroup
from rill.models.loading import load_model_config
from rill.runtime.process.agent import bootstrap
from rill.runtime.process.threads import thread_env
from rill.runtime.transfer import collective

if TYPE_CHECKING:
    from rill.inference.native.engine import NativeEngine

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
STEP_TIMEOUT_S = 300
"""For one rank to wait for the others within a step: far above the length of any."""
END_TIMEOUT_S = 10.0
SETTLE_S = 0.2
"""A rank that is killed takes others with it, who say that they lost it: until all have, nobody is blamed."""
HERE, READY = "here", "ready"


class Seat(NamedTuple):
    """What a follower is told first."""

    config: NativeEngine.Config
    rank: int
    size: int
    port: int
    """Where the group meets, on this machine."""
    device: str

    def join(self, store: Any) -> TensorGroup:
        """Returns when all ranks are there."""
        device = torch.device(self.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        group = collective.open_group(
            backend, store, self.rank, self.size, name="rill-tensor-parallel", timeout_s=STEP_TIMEOUT_S
        )
        return TensorGroup(group, rank=self.rank, size=self.size, device=device)


def lead(config: NativeEngine.Config, on_death: Callable[[EngineDiedError], None]) -> ModelRunner:
    """Rank 0's runner, checked, with the others behind it. `on_death`: told, from a thread of its own, that one of them
    is gone."""
    check_divides(load_model_config(config.model), config.tensor_parallel_size)
    followers = Followers(config, on_death)
    try:
        group = followers.start()
        own, expected = load_runner(config, None, group=group)
        followers.hear(READY, MOVE_TIMEOUT_S)
        followers.watch()
        runner = cast(ModelRunner, LeadingRunner(own, group, followers))
        check_runner(runner, expected)
    except BaseException:
        followers.close()
        raise
    return runner


class LeadingRunner:
    """Stands for rank 0's runner: what changes a runner is done on every rank, all else on this one alone."""

    _EVERYWHERE = frozenset(
        {"allocate_cache", "prepare", "offload_weights", "reload_weights", "finish_update"}
    )

    def __init__(self, own: ModelRunner, group: TensorGroup, followers: Followers) -> None:
        self._own, self._group, self._followers = own, group, followers

    def __getattr__(self, name: str) -> Any:
        if name in self._EVERYWHERE:
            return partial(self._everywhere, name)
        return getattr(self._own, name)

    def launch(self, steps: list[StepBatch]) -> PendingTurn:
        self._followers.tell("follow", [told(step) for step in steps])
        turn = self._own.launch(steps)

        def read() -> TurnResult:
            result = turn()
            self._followers.check()  # a turn that was let go of because a rank died holds no tokens
            return result

        return read

    def all_logits(self, batch: StepBatch) -> torch.Tensor:
        self._followers.tell("follow", [told(batch)])
        return self._own.all_logits(batch)

    def free_bytes(self) -> int:
        """What every rank can take at once; on the CPU they take it from the same memory."""
        self._followers.tell("free_bytes")
        own = self._group.least(self._own.free_bytes())
        return own // self._group.size if self._group.device.type == "cpu" else own

    def free_cache(self) -> None:
        self._give_up("free_cache")

    def free_graphs(self) -> None:
        self._give_up("free_graphs")

    def _give_up(self, name: str) -> None:
        with suppress(EngineError):  # at the end there may be nobody left to be told
            self._followers.tell(name)
        getattr(self._own, name)()

    def weight_targets(self) -> WeightTargets:
        return WeightTargets(self._own.model, self._own.shards, partial(self._followers.tell, "receive"))

    def close(self) -> None:
        self._followers.close()

    def _everywhere(self, name: str, *args: Any) -> None:
        self._followers.tell(name, *args)
        getattr(self._own, name)(*args)


def told(step: StepBatch) -> StepBatch:
    """What another rank needs of a step: not whose tokens they are, nor all tables where their changes do."""
    changed = step.tables[changed_places(step.table_updates)]
    return replace(step, tables=changed, sampled=[], scored=[], sampling=replace(step.sampling, edits=None))


class Member(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection


class Followers:
    """The other ranks' processes. Told by one thread at a time; watched by one of its own."""

    def __init__(self, config: NativeEngine.Config, on_death: Callable[[EngineDiedError], None]) -> None:
        self.failure: EngineDiedError | None = None
        self._config, self._on_death = config, on_death
        self._device, self._size = device_of(config.device), config.tensor_parallel_size
        self._check_devices()
        self._members: list[Member] = []
        self._group: TensorGroup | None = None
        self._watcher: threading.Thread | None = None
        self._died = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> TensorGroup:
        """Their processes; returns when all ranks have met."""
        self._store = collective.open_store(HOST, 0, is_master=True, timeout_s=STEP_TIMEOUT_S)
        for rank in range(1, self._size):
            self._members.append(self._start(rank))
            self._members[-1].connection.send(self._seat(rank))
        self.hear(HERE, STEP_TIMEOUT_S)
        self._group = self._seat(0).join(self._store)
        self._group.blame = self._blame
        return self._group

    def hear(self, word: str, timeout_s: float) -> None:
        """Return when all have said it."""
        deadline = time.monotonic() + timeout_s
        for member in self._members:
            if not member.connection.poll(max(0.0, deadline - time.monotonic())):
                raise EngineError(f"{self._name(member)} was not {word} within {timeout_s:g} s")
            said = _heard(member.connection)
            if said != word:
                raise EngineError(self._ending(member, said))

    def tell(self, method: str, *args: Any) -> None:
        """To all, in the same order; they do it while this rank does its part."""
        self.check()
        message = pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL)
        for member in self._members:
            try:
                member.connection.send_bytes(message)
            except OSError as error:
                raise self._blame(error) from error

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def watch(self) -> None:
        """From here on a follower has nothing to say but that it ends."""
        self._watcher = threading.Thread(target=self._watch, name="rill-followers", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End all of them, in order where they still listen. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for member in self._members:
            if self.failure is not None:
                member.process.kill()  # it may wait for the one that is gone
            with suppress(OSError):
                member.connection.send_bytes(pickle.dumps(("end", ())))
        for member in self._members:
            try:
                member.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(END_TIMEOUT_S)  # it has seen their sockets close
        for member in self._members:
            member.connection.close()
            assert member.process.stdin is not None
            member.process.stdin.close()

    def _start(self, rank: int) -> Member:
        ours, theirs = socket.socketpair()
        # A follower that has stopped reading must not stop this rank for longer than a step may take.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STEP_TIMEOUT_S, 0))
        process = subprocess.Popen(
            bootstrap("rill.inference.native.followers:main", str(theirs.fileno()), list(sys.path)),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends
            env={**os.environ, **thread_env(torch.get_num_threads(), os.environ)},
        )
        theirs.close()
        return Member(rank, process, Connection(ours.detach()))

    def _seat(self, rank: int) -> Seat:
        device = f"cuda:{(self._device.index or 0) + rank}" if self._device.type == "cuda" else "cpu"
        return Seat(self._config, rank, self._size, self._store.port, device)

    def _check_devices(self) -> None:
        if self._device.type == "cuda":
            count = torch.cuda.device_count() - (self._device.index or 0)
            if count < self._size:
                raise ConfigError(
                    f"tensor_parallel_size {self._size} from {self._device} on, and this process sees {count} GPUs "
                    'there: give it more (placement "0-1:0" gives two to one process), or lower it'
                )

    def _watch(self) -> None:
        by_connection = {member.connection: member for member in self._members}
        wait(list(by_connection))  # ends with them: close() sees to that
        if self._is_closed:
            return
        time.sleep(SETTLE_S)
        said = {member: _heard(c) for c, member in by_connection.items() if c.poll()}
        guilty = min(said, key=lambda member: bool(said[member]))
        ending = self._ending(guilty, said[guilty])
        with self._lock:
            if self._is_closed:
                return
            self.failure = EngineDiedError(ending)
        self._died.set()
        if self._group is not None:
            self._group.abort()
        self._on_death(self.failure)

    def _blame(self, error: Exception) -> Exception:
        """Why rank 0 could not go on: the rank that is gone, which the watcher sees a moment later."""
        self._died.wait(END_TIMEOUT_S)
        return self.failure or EngineError(f"the ranks of the engine did not come together: {error}")

    def _ending(self, member: Member, said: str) -> str:
        with suppress(subprocess.TimeoutExpired):
            member.process.wait(END_TIMEOUT_S)
        how = f"failed: {said}" if said else f"ended (exit code {member.process.returncode})"
        return f"{self._name(member)} {how}"

    def _name(self, member: Member) -> str:
        return f"rank {member.rank} of the engine's {self._size} (process {member.process.pid})"


def _heard(connection: Connection) -> str:
    """Nothing where it is gone without a word."""
    try:
        return str(connection.recv())
    except (EOFError, OSError):
        return ""


# --- another rank's process -----------------------------------------------------------------------------------


class Follower:
    """Does what rank 0 says, in that order."""

    def __init__(self, seat: Seat) -> None:
        config = seat.config
        store = collective.open_store(HOST, seat.port, is_master=False, timeout_s=STEP_TIMEOUT_S)
        self._group = seat.join(store)
        self._runner, _ = load_runner(config, None, group=self._group)
        self._runner.enter_thread()
        self._targets = self._runner.weight_targets()
        num_columns = -(-self._runner.max_len // config.block_size)
        self._tables = np.zeros((self._runner.max_num_seqs, num_columns), dtype=np.int32)

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
    """Ends when it is told to, when what it does fails, which it says first, and when rank 0's process is gone."""
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

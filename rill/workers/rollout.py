"""The rollout worker: an engine, with the environments beside it or elsewhere.

    generate   tasks ──▶ episodes in this process ──▶ engine ──▶ samples, outcomes         (no environment group)
    serve      requests ──▶ engine ──▶ answers of whoever asked                            (environments elsewhere)

Either lasts for an epoch of its channel and holds the devices meanwhile. Two threads: the event loop of the call, and
the engine's own. Calls marked concurrent (`update`, `stop`) come in beside them. New weights reach the engine between
two of its steps, and sequences that were running continue under them.

An engine that has to go (a SIGTERM: its machine is wanted for something else; or `remove` with notice) ends every
sequence where it is, writes the tokens to the token log and ends its process: others go on behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from rill.config import PartConfig
from rill.errors import RequestError
from rill.inference.base import ENGINES, Engine, MemoryLevel, PauseMode
from rill.inference.policy import Asked, EngineGate, answered
from rill.journal.logged import LoggedEngine
from rill.models.loading import load_tokenizer
from rill.runtime.channel import Channel, Lease
from rill.runtime.worker import Worker, concurrent
from rill.telemetry import trace
from rill.weights import Pulled, Receiver, SealedManifest, open_receiver, seated
from rill.workers.config import SyncConfig
from rill.workers.env_worker import Question, Refused
from rill.workers.episodes import Episodes, EpisodeSettings
from rill.workers.event_loop import EventLoop
from rill.workers.records import Flows

LOCK_S = 0.0005
"""After so long a busy thread gives up the interpreter's lock. Python's own 5 ms are two steps of a GPU's engine, which
asks for the lock in every step: while a batch of answers is being scored it would stand still."""
LEFT_CODE = 128 + signal.SIGTERM
"""How the process of an engine that was told to go exits."""
EVERY_EPOCH = 1 << 62


@dataclass(slots=True, eq=False)
class OpenQuestion:
    """A question that is being answered."""

    lease: Lease
    target: Channel
    num_left: int


class AnswerDesk:
    """Sends every completion as it comes; a question is dealt with together with its last one. The engine's thread
    wakes the event loop once for all that a step has ended: each time the two threads change places costs it some of a
    step."""

    def __init__(self, loop: asyncio.AbstractEventLoop, room: asyncio.Semaphore) -> None:
        self._loop = loop
        self._room = room
        self._ended: deque[tuple[OpenQuestion, Future[Any]]] = deque()
        self._has_ended = asyncio.Event()
        self._is_woken = False

    def add(self, asked: OpenQuestion, future: Future[Any]) -> None:
        future.add_done_callback(partial(self._put_down, asked))

    def _put_down(self, asked: OpenQuestion, future: Future[Any]) -> None:
        """By the engine's thread."""
        self._ended.append((asked, future))
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for answers any more
                self._loop.call_soon_threadsafe(self._has_ended.set)

    async def send(self) -> None:
        """Until it is cancelled; raises what an engine ended with."""
        while True:
            await self._has_ended.wait()
            self._has_ended.clear()
            self._is_woken = False
            while self._ended:
                asked, future = self._ended.popleft()
                asked.num_left -= 1
                async with contextlib.nullcontext() if asked.num_left else asked.lease:
                    await asked.target.put_async(future.result())
                self._room.release()


class RolloutWorker(Worker):
    def __init__(self, *, settings: EpisodeSettings, sync: SyncConfig) -> None:
        """Environments run here, unless they have processes of their own; then those ask (`serve`)."""
        sys.setswitchinterval(LOCK_S)
        config = settings.rollout
        self.engine: Engine = ENGINES.load(config.engine.type)(placed(config.engine, self.device))
        self.gate = EngineGate(self.engine)
        self.sync = sync
        self.receiver = self._open_receiver()
        self.max_concurrent = config.max_concurrent
        name = f"{self.group_name}-{self.rank}"
        self.journal = settings.open_journal(name)
        self.episodes = None if config.env_workers else Episodes(settings, name, self.journal)
        self.logged: Asked = self.gate
        """The engine for training: evaluations are not logged, they can be repeated."""
        if self.journal is not None:
            tokenizer = self.episodes.tokenizer if self.episodes else load_tokenizer(settings.model)
            self.logged = LoggedEngine(self.gate, self.journal, decode=tokenizer.decode)
        self._updating = threading.Lock()
        self.loop = EventLoop()
        # In a thread: what the signal interrupts may hold a lock that `notice` needs.
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=self.notice, args=(0.0,)).start())

    def close(self) -> None:
        self.loop.close()
        if self.episodes is not None:
            self.episodes.close()
        if self.journal is not None:
            self.journal.close()
        self.receiver.close()
        self.engine.close()

    # --- device memory, called by the device lock. Host memory is not scarce: a CPU engine stays. --------

    def onload(self) -> None:
        if self.device != "cpu":
            self.engine.restore()

    def offload(self) -> None:
        if self.device != "cpu":
            self.engine.release(MemoryLevel.WEIGHTS)

    # --- generating ---------------------------------------------------------------------------------------

    def generate(self, flows: Flows, epoch: int) -> int:
        """Until this epoch of the tasks ends and everything taken is finished; returns the number of groups."""
        assert self.episodes is not None, "this worker's environments are elsewhere"
        with self.device_lock(flows.tasks, flows.samples):
            return self.loop.run(self.episodes.run(flows, self.logged, self.gate, epoch))

    def serve(self, requests: Channel, answers: tuple[Channel, ...], epoch: int) -> int:
        """Until this epoch of the requests ends and all are answered; returns how many there were."""
        with self.device_lock(requests, *answers):
            return self.loop.run(self._serve(requests.of_epoch(epoch), answers))

    def notice(self, notice_s: float) -> None:
        """Put down what was sampled and end this process. On the event loop, where there is one: until the end nobody
        acts on answers that were cut off here."""
        self.loop.call(self._go)

    def _go(self) -> None:
        self.gate.stop(EVERY_EPOCH)
        if self.journal is not None:
            self.journal.close()
        trace.flush()
        os._exit(LEFT_CODE)

    @concurrent
    def stop(self, epoch: int) -> None:
        """Stop what is sampled for tasks of this epoch and those before: it is answered with what was said so far."""
        self.gate.stop(epoch)

    def rest(self) -> None:
        """Between two sessions of a run, when nothing is under way: the trainer goes back to its checkpoint, and what
        was sampled since then comes from the token log."""
        with self._updating:
            if self.journal is not None:
                self.journal.hand_over()
            self.gate.reopen()
            self.engine.rewind()
            self.receiver.close()
            self.receiver = self._open_receiver()

    async def _serve(self, requests: Channel, answers: tuple[Channel, ...]) -> int:
        room, num_answered = asyncio.Semaphore(self.max_concurrent), 0
        desk = AnswerDesk(asyncio.get_running_loop(), room)
        try:
            async with asyncio.TaskGroup() as running:
                sending = running.create_task(desk.send())
                async for lease in requests.leases():
                    question: Question = lease.value
                    num_answered += len(question.requests)
                    asked = OpenQuestion(lease, answers[question.asker], len(question.requests))
                    for future in self._submit(question):
                        desk.add(asked, future)
                    for _ in question.requests:
                        await room.acquire()  # before the next is begun: another engine may have room for it
                sending.cancel()  # the epoch is over when the last question is dealt with
        except ExceptionGroup as errors:  # of asking and of sending: the first is what went wrong
            raise (first := errors.exceptions[0]) from first.__cause__
        return num_answered

    def _submit(self, question: Question) -> Sequence[Future[Any]]:
        """All at once; where one is impossible, each by itself."""
        asked = self.logged if question.is_training else self.gate
        try:
            return asked.submit(question.requests, question.epoch)
        except RequestError as error:
            if len(question.requests) == 1:
                return [answered(Refused(question.requests[0].id, str(error)))]
        parts = [self._submit(question._replace(requests=(one,))) for one in question.requests]
        return [future for part in parts for future in part]

    # --- weights ------------------------------------------------------------------------------------------

    def _open_receiver(self) -> Receiver:
        return open_receiver(seated(self.sync.transport, rank=self.rank + 1, num_receivers=self.world_size))

    @concurrent
    def update(self, manifest: SealedManifest, interrupt: bool) -> Pulled:
        """Take new weights between two steps of the engine; running sequences continue under them, beside the proof."""
        opened = manifest.open()  # before the engine is stopped for it
        with self.device_lock(), self._updating:
            self.engine.pause(PauseMode.INTERRUPT if interrupt else PauseMode.FINISH, self.sync.timeout_s)
            try:
                self.engine.update_weights(self.receiver.pull(opened), manifest.version)
            finally:
                self.engine.resume()
            name = f"{self.group_name}[{self.rank}]"
            return Pulled.proven(name, manifest, self.engine.version, self.engine.score)


def placed(engine: PartConfig, device: str) -> PartConfig:
    """The engine's configuration with the device its worker was given, where it is free to choose one."""
    if "device" in type(engine).model_fields and engine.model_dump()["device"] == "auto":
        return engine.model_copy(update={"device": device})
    return engine

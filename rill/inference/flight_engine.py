"""What the engines of others have in common: requests under way as flights, and how all of them are told to stop.

        caller's thread                    loop thread (asyncio)                        a server, or vLLM here
   submit ──▶ Flight ──▶ one task per flight: wait while held ──▶ one attempt ─────▶ tokens
                              ▲                                        │ record in the flight, on_delta
                              └── cut short by a pause or an update ◀──┘ go on later from the tokens so far

Interruption is ours: an attempt is ended, and the request goes on later with its tokens as prompt. So partial rollouts
work with whatever takes and gives token ids, and no request is under way while weights change: every token's version is
exact, as long as nobody else updates that engine, and none comes from an old cache entry.

A subclass gives `_attempt` and, where its engine can, `_load_weights`, `_score_one`, `_flush` and the memory calls. Its
coroutines run on the loop's thread; `_call` is how other threads get there. remote.py is for servers, vllm.py for vLLM
in this process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from rill.errors import EngineError, RequestError, StuckError, UnsupportedError, WeightSyncError
from rill.inference.base import (
    Completion,
    Delta,
    EngineStats,
    Feature,
    MemoryLevel,
    NamedTensors,
    PauseMode,
    Request,
)
from rill.inference.commands import CONTROL_TIMEOUT_S, MOVE_TIMEOUT_S
from rill.inference.continued import Flight
from rill.inference.requests import Generates, check_ids, check_request, further
from rill.inference.tally import Tally
from rill.types import Floats, PolicyVersion, TokenIds

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0


class FlightEngine(Generates):
    """See rill.inference.base.Engine for what each method promises."""

    advice: Mapping[Feature, str] = {}
    """Of a subclass: how it comes to have a feature."""
    takes_partial_weights = False
    """Of a subclass: whether an update may lack parameters."""

    def __init__(self, name: str, where: str) -> None:
        """`where`: the engine as messages name it."""
        self.name, self._where = name, where
        self.version = PolicyVersion(0)
        self.max_context = 0
        """Set by a subclass: what its engine takes."""
        self.vocab_size: int | None = None
        """Set by a subclass that knows it: bad ids are then refused in submit()."""
        self._unavailable: str | None = None
        """Why no request can be taken."""
        self._is_closed = self._is_paused = self._is_held = False
        self._released: MemoryLevel | None = None
        self._lock = threading.Lock()
        self._flights: dict[str, Flight] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tally = Tally()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{where}-flights", daemon=True)
        self._thread.start()

    # --- for subclasses ----------------------------------------------------------------------------------

    @property
    def features(self) -> frozenset[Feature]:
        raise AssertionError("a subclass says what it has")

    def _check(self, request: Request) -> None:
        """Raises for what could not be answered, or cut short by the context, before anything is queued."""
        check_request(request, self)
        length, wanted = len(request.token_ids), request.sampling.max_new_tokens
        if length + wanted > self.max_context:
            asked = f"request {request.id}: {length} prompt tokens and max_new_tokens={wanted}"
            raise RequestError(f"{asked} do not fit the context of {self.max_context}")

    async def _attempt(self, flight: Flight, request: Request) -> Completion:
        """Run `request`, which is what is left of the flight, and record what it gains, to the flight's end. Cancelled,
        the engine must not go on with it."""
        raise AssertionError

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        """Afterwards the engine has them, and nothing in its prefix cache is older. Whatever it raises, the engine is
        unavailable until a whole update succeeds."""
        raise AssertionError

    async def _score_one(self, token_ids: TokenIds, adapter: str | None) -> Floats:
        """At temperature 1."""
        raise AssertionError

    async def _flush(self) -> None:
        """Drop the prefix cache, where it can be told to."""

    async def _release(self, level: MemoryLevel, before: MemoryLevel | None) -> None:
        """Of what is released already, `before` is the level, a lower one."""

    async def _restore(self, released: MemoryLevel) -> None: ...

    async def _close(self) -> None: ...

    # --- requests ----------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        self._check_available()
        for request in requests:
            if request.guide is not None or request.num_top_logprobs:
                raise UnsupportedError(
                    f"request {request.id!r}: {self.name} takes no grammars and tells the sampled tokens' "
                    "log-probabilities only: use native"
                )
            self._check(request)
        flights = [Flight(request, on_delta) for request in requests]
        with self._lock:
            check_ids([request.id for request in requests], self._flights)
            self._flights.update((flight.request.id, flight) for flight in flights)
        self._loop.call_soon_threadsafe(self._start, flights)
        return [flight.future for flight in flights]

    def score(
        self,
        sequences: Sequence[TokenIds],
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        *,
        adapter: str | None = None,
    ) -> list[Floats]:
        self._require(Feature.SCORE)
        self._check_available()
        if temperature != 1.0:
            raise UnsupportedError(f"{self.name} scores at temperature 1 only, got {temperature}")

        async def score_all() -> list[Floats]:
            return await asyncio.gather(*(self._score_one(s, adapter) for s in sequences))

        return self._call(score_all(), "score", timeout_s)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        work = self._abort(lambda flight: request_ids is None or flight.request.id in request_ids)
        if threading.current_thread() is self._thread:  # from on_delta it takes effect after this step
            asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            self._call(work, "abort")

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        async def pause_all() -> None:
            self._is_paused = True
            await self._hold(cut=mode is PauseMode.INTERRUPT)

        self._call(pause_all(), f"pause({mode})", timeout_s)

    def resume(self) -> None:
        async def resume_all() -> None:
            self._is_paused = False
            self._go_on()

        self._call(resume_all(), "resume")

    def release(self, level: MemoryLevel) -> None:
        self._require(Feature.RELEASE_MEMORY)

        async def release() -> None:
            if self._tasks:
                raise EngineError(
                    f"{self.name}: release needs an idle engine, {len(self._tasks)} requests run: pause"
                )
            self._is_held = True
            before, after = self._released, further(level, self._released)
            if after is not before:
                await self._release(after, before)
                self._released = after

        self._call(release(), "release", MOVE_TIMEOUT_S)

    def restore(self) -> None:
        self._require(Feature.RELEASE_MEMORY)

        async def restore() -> None:
            if self._released is not None:
                await self._restore(self._released)
            self._released = None
            self._go_on()

        self._call(restore(), "restore", MOVE_TIMEOUT_S)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        """Requests under way are cut short, and go on from their tokens under the new weights."""
        self._require(Feature.UPDATE_WEIGHTS)
        if partial and not self.takes_partial_weights:
            raise UnsupportedError(f"{self.name}: its reload needs all parameters; publish whole weights")
        if partial and self._unavailable is not None:
            raise WeightSyncError(f"{self.name}: after a failed update only a whole one can follow")
        if version <= self.version:
            raise WeightSyncError(f"{self.name}: version {version} is not newer than {self.version}")

        async def swap() -> None:
            async with self._interruption():
                try:
                    await self._load_weights(tensors, version, partial)
                except Exception as error:  # boundary: a sender, a disk and vLLM raise anything
                    self._unavailable = f"the last weight update failed ({error}): update again"
                    if isinstance(error, WeightSyncError):
                        raise
                    raise WeightSyncError(f"{self.name}: {error}") from error
                except asyncio.CancelledError:
                    self._unavailable = (
                        "the last weight update was given up, who knows how far it came: update again"
                    )
                    raise
                self.version, self._unavailable = version, None

        self._call(swap(), "update_weights", MOVE_TIMEOUT_S)

    def rewind(self) -> None:
        self.version = PolicyVersion(0)

    def flush(self) -> None:
        self._call(self._flush(), "flush")

    def stats(self) -> EngineStats:
        num_running = len(self._tasks)
        return self._tally.stats(
            num_running=num_running,
            num_waiting=max(0, len(self._flights) - num_running),
            version=self.version,
        )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.abort()
        self._call(self._close(), "close")
        self._call(self._loop.shutdown_asyncgens(), "close", _CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _call(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float = CONTROL_TIMEOUT_S) -> T:
        """Run this on the loop and wait for it. What was given up has heard of it when this raises."""
        if threading.current_thread() is self._thread:
            work.close()
            raise EngineError(
                f"{what}() was called from on_delta, which must not block: call it from another thread"
            )
        ended = threading.Event()

        async def run() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            ended.wait(_CANCEL_TIMEOUT_S)
            raise StuckError(f"{self._where}: {what} did not end within {timeout_s} s") from None

    def _check_available(self) -> None:
        if self._is_closed or self._unavailable is not None:
            raise EngineError(f"{self._where}: {self._unavailable or 'the engine is closed'}")

    def _require(self, feature: Feature) -> None:
        if feature not in self.features:
            advice = self.advice.get(feature) or f"it has {', '.join(sorted(self.features)) or 'none'}"
            raise UnsupportedError(f"{self.name} has no {feature.value}: {advice}")

    # --- loop: control -----------------------------------------------------------------------------------

    async def _hold(self, *, cut: bool) -> None:
        """Start nothing more; what runs is cut short, or awaited."""
        self._is_held = True
        if cut:
            await self._cut(list(self._flights.values()))
        while not cut and (tasks := list(self._tasks.values())):
            await asyncio.wait(tasks)

    @asynccontextmanager
    async def _interruption(self) -> AsyncGenerator[None]:
        """What runs is cut short, and goes on from its tokens afterwards."""
        try:
            await self._hold(cut=True)
            yield
        finally:
            self._go_on()

    def _go_on(self) -> None:
        """Start everything that waits, unless paused, released or without usable weights."""
        if self._is_paused or self._released is not None or self._unavailable is not None:
            return
        self._is_held = False
        self._start(list(self._flights.values()))

    async def _abort(self, is_wanted: Callable[[Flight], bool]) -> None:
        flights = [flight for flight in self._flights.values() if is_wanted(flight)]
        for flight in flights:
            flight.is_aborted = True
        try:
            await self._cut(flights)
        finally:
            for flight in flights:
                self._end(flight, flight.aborted())

    # --- loop: one flight --------------------------------------------------------------------------------

    def _start(self, flights: Sequence[Flight]) -> None:
        """Those that have not ended and do not run: submit() and _go_on() may both ask for one."""
        if self._is_held:
            return  # _go_on() starts them
        for flight in flights:
            name = flight.request.id
            if self._flights.get(name) is flight and name not in self._tasks and not flight.is_aborted:
                self._tasks[name] = task = self._loop.create_task(self._drive(flight))
                task.add_done_callback(partial(self._forget_task, flight))

    def _forget_task(self, flight: Flight, task: asyncio.Task[None]) -> None:
        if self._tasks.get(flight.request.id) is task:
            del self._tasks[flight.request.id]
        self._start([flight])  # where it was told to go on while it was still being cut short

    async def _drive(self, flight: Flight) -> None:
        try:
            outcome: Completion | BaseException | None = flight.already_ended()
            if outcome is None:
                flight.restart()
                outcome = await self._attempt(flight, flight.next_request())
        except Exception as error:  # noqa: BLE001 - boundary: whatever happened belongs to the request's future
            outcome = error
        self._end(flight, outcome)

    def _gain(self, flight: Flight, delta: Delta) -> None:
        """New tokens of a flight."""
        self._tally.add(num_generated_tokens=len(delta.token_ids))
        flight.record(delta)

    async def _cut(self, flights: Sequence[Flight]) -> None:
        """End these attempts and wait until they have ended; the flights keep their tokens."""
        tasks = [self._tasks[f.request.id] for f in flights if f.request.id in self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _end(self, flight: Flight, outcome: Completion | BaseException) -> None:
        if self._flights.pop(flight.request.id, None) is None:
            return
        self._tasks.pop(flight.request.id, None)
        if isinstance(outcome, Completion):
            self._tally.end(num_prompt=len(flight.request.token_ids), num_cached=outcome.num_cached_tokens)
        flight.finish(outcome)

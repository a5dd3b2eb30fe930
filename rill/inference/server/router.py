"""Several replicas as one Engine: prefix-aware routing, health checks, and retry of requests whose replica died.

    submit ──▶ choose(prefix, load) ──▶ replica 0 ─┐ deltas: recorded in the flight, passed on
                                    ──▶ replica 1 ─┤ completion: joined with what earlier replicas made
                                    ──▶ …          ┘ PeerDiedError: the flight goes on elsewhere, from its last token
    replica_set.py: watches the replicas, starts dead ones again, tells all the same

A continued request has the tokens so far as prompt, the same seed and what is left of its length. Engines that draw
by (seed, position), as the native one does, then give the very tokens that the dead replica would have given. Malformed
requests are refused here; what only the replica's engine can know to be wrong comes through the request's future.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from rill.config import PartConfig
from rill.errors import EngineError, PeerDiedError, StuckError
from rill.inference.base import Completion, Delta, EngineStats, Feature, NamedTensors, Request
from rill.inference.flight import Flight
from rill.inference.replica import ReplicaEngine
from rill.inference.requests import Generates, check_ids, check_request
from rill.inference.server.prefix_index import PrefixIndex
from rill.inference.server.replica_set import ReplicaSet, RouterConfig, Slot
from rill.inference.tally import total
from rill.types import Floats, PolicyVersion, TokenIds


class Router(Generates, ReplicaSet):
    """An Engine made of replicas. Returns from construction when all of them are loaded."""

    def __init__(self, engine: PartConfig, config: RouterConfig | None = None) -> None:
        self._flights: dict[str, Flight] = {}
        self._waiting: list[Flight] = []
        self._prefixes = PrefixIndex()
        self._num_retried = 0
        super().__init__(engine, config or RouterConfig())

    # --- requests ----------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        for request in requests:
            check_request(
                request,
                max_context=self.max_context,
                vocab_size=self.vocab_size,
                adapters=self.adapters,
                takes_pictures=Feature.PICTURES in self.features,
            )
        flights = [Flight(request, on_delta) for request in requests]
        with self.lock:
            if self.is_closed:
                raise EngineError("the router is closed")
            check_ids([request.id for request in requests], self._flights)
            for flight in flights:
                self._flights[flight.request.id] = flight
        self._dispatch(flights)
        return [flight.future for flight in flights]

    def score(
        self,
        sequences: Sequence[TokenIds],
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        *,
        adapter: str | None = None,
    ) -> list[Floats]:
        return self._spread(
            sequences, lambda engine, part: engine.score(part, temperature, timeout_s, adapter=adapter)
        )

    def embed(self, sequences: Sequence[TokenIds], timeout_s: float = 600.0) -> list[Floats]:
        return self._spread(sequences, lambda engine, part: engine.embed(part, timeout_s))

    def _spread(
        self, sequences: Sequence[TokenIds], read: Callable[[ReplicaEngine, list[TokenIds]], list[Floats]]
    ) -> list[Floats]:
        """Split over the replicas. Reading has no state, so a part whose replica dies is done again."""
        slots = self.ready_or_fail()
        parts = [list(range(i, len(sequences), len(slots))) for i in range(len(slots))]
        scores: dict[int, Floats] = {}

        def run(slot: Slot, part: list[int]) -> None:
            values = read(slot.running, [sequences[i] for i in part])
            scores.update(zip(part, values, strict=True))

        failed = self.each(run, [(s, p) for s, p in zip(slots, parts, strict=True) if p], PeerDiedError)
        for _, part in failed:
            run(self.ready_or_fail()[0], part)
        return [scores[i] for i in range(len(sequences))]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self.lock:
            wanted = set(self._flights if request_ids is None else request_ids)
            parked = [f for f in self._waiting if f.request.id in wanted]
            self._waiting = [f for f in self._waiting if f not in parked]
            slots = self.ready()
            for request_id in wanted & self._flights.keys():
                self._flights[request_id].is_aborted = True
        for flight in parked:
            self._end(flight, flight.aborted())
        ids = None if request_ids is None else sorted(wanted)
        self.each(lambda slot: slot.running.abort(ids), [(s,) for s in slots], PeerDiedError)

    # --- control -----------------------------------------------------------------------------------------

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        super().update_weights(tensors, version, partial=partial)
        with self.lock:
            self._prefixes.forget()

    def flush(self) -> None:
        with self.lock:
            self._prefixes.forget()
        self.on_all(lambda engine: engine.flush())

    def stats(self) -> EngineStats:
        """Sums over the replicas that answer; `extra` says how many are ready and how often a request moved."""
        found: list[EngineStats] = []

        def ask(slot: Slot) -> None:
            found.append(slot.running.stats(self.config.health_timeout_s))

        slots = self.ready()
        self.each(ask, [(s,) for s in slots], PeerDiedError, StuckError)
        with self.lock:
            extra = {"replicas": float(len(slots)), "retried": float(self._num_retried)}
            extra["waiting_for_replica"] = float(len(self._waiting))
        return total(found, version=self.version, extra=extra)

    def close(self) -> None:
        super().close()
        with self.lock:
            flights = list(self._flights.values())
        for flight in flights:
            self._end(flight, flight.aborted())

    # --- routing -----------------------------------------------------------------------------------------

    def _dispatch(self, flights: Sequence[Flight]) -> None:
        """Choose for each, then send together what goes together: a group reaches its replica in one instant."""
        batches: dict[tuple[int, bool], list[Flight]] = {}
        with self.lock:
            for flight in flights:
                slot = self._choose(flight)
                if slot is None:
                    flight.parked_at = time.monotonic()
                    self._waiting.append(flight)
                    continue
                flight.slot_index = slot.index
                slot.num_in_flight += 1
                batches.setdefault((slot.index, flight.on_delta is not None), []).append(flight)
        for (index, is_streamed), batch in batches.items():
            self._send(self.slots[index], batch, is_streamed)

    def _choose(self, flight: Flight) -> Slot | None:
        """The replica with most of the prompt in its cache, unless it is much busier than the idlest."""
        ready = self.ready()
        if not ready:
            return None
        request = flight.next_request()
        idlest = min(ready, key=lambda s: s.num_in_flight)
        chosen = idlest
        if len(ready) > 1:
            salt = f"{request.adapter or ''}\0{request.cache_salt}"  # what an engine's cache tells apart
            matched = self._prefixes.match(request.token_ids, salt)
            best = max(ready, key=lambda s: (matched.get(s.index, 0), -s.num_in_flight))
            is_worth = matched.get(best.index, 0) * 2 >= len(request.token_ids)
            if is_worth and best.num_in_flight - idlest.num_in_flight <= self.config.load_gap:
                chosen = best
            self._prefixes.insert(request.token_ids, salt, chosen.index)
        return chosen

    def _send(self, slot: Slot, flights: list[Flight], is_streamed: bool) -> None:
        try:
            futures = slot.running.submit_recorded(
                [f.next_request() for f in flights], self._on_delta, is_streamed=is_streamed
            )
        except PeerDiedError as error:
            for flight in flights:
                self._on_loss(flight, error)
            return
        for flight, future in zip(flights, futures, strict=True):
            future.add_done_callback(lambda done, flight=flight: self._on_done(flight, done))  # type: ignore[misc]
        if late := [flight.request.id for flight in flights if flight.is_aborted]:
            with suppress(PeerDiedError):  # then it ends as aborted
                slot.running.abort_soon(late)  # they were between two replicas when the others were told

    def _on_delta(self, delta: Delta) -> None:
        with self.lock:
            flight = self._flights.get(delta.request_id)
        if flight is not None:
            flight.record(delta)

    def _on_done(self, flight: Flight, done: Future[Completion]) -> None:
        error = done.exception()
        if isinstance(error, PeerDiedError):
            self._on_loss(flight, error)
        elif error is not None:
            self._end(flight, error)
        else:
            self._end(flight, flight.joined(done.result()))

    def _on_loss(self, flight: Flight, error: Exception) -> None:
        """The replica died under this request: go on elsewhere, unless it was over, or often unlucky."""
        flight.num_losses += 1
        ended = flight.already_ended()
        if ended is not None or flight.is_aborted or self.is_closed:
            self._end(flight, ended or flight.aborted())
        elif flight.num_losses > self.config.max_retries:
            self._end(
                flight, EngineError(f"{flight.num_losses} replicas died under this request; last: {error}")
            )
        else:
            with self.lock:
                self._leave_slot(flight)
                self.find_dead()
                self._num_retried += 1
            flight.restart()
            self._dispatch([flight])

    def _end(self, flight: Flight, outcome: Completion | BaseException) -> None:
        with self.lock:
            if self._flights.pop(flight.request.id, None) is None:
                return
            self._leave_slot(flight)
        flight.finish(outcome)

    def _leave_slot(self, flight: Flight) -> None:
        if flight.slot_index is not None:
            self.slots[flight.slot_index].num_in_flight -= 1
            flight.slot_index = None

    def _on_death(self, index: int) -> None:
        self._prefixes.forget(index)

    def _on_ready(self) -> None:
        with self.lock:
            waiting, self._waiting = self._waiting, []
        self._dispatch(waiting)

    def _on_round(self) -> None:
        """Requests that no replica has taken for too long, or that none ever will, fail."""
        with self.lock:
            limit = time.monotonic() - self.config.start_timeout_s
            late = [f for f in self._waiting if self.is_hopeless or f.parked_at < limit]
            self._waiting = [f for f in self._waiting if f not in late]
        for flight in late:
            self._end(flight, EngineError("no replica is alive to take this request"))

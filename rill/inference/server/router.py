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
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rill.config import PartConfig
from rill.errors import EngineError, PeerDiedError, RillError
from rill.inference.base import Completion, Delta, EngineStats, Feature, NamedTensors, Request
from rill.inference.continued import Flight
from rill.inference.replica import End, ReplicaProcess
from rill.inference.requests import Generates, check_ids, check_request
from rill.inference.server.replica_set import ReplicaSet, RouterConfig
from rill.inference.tally import total
from rill.types import Floats, PolicyVersion, TokenIds

RECORD_WAIT_S = 0.1
"""How long tokens that nobody streams may wait: at most this much work is lost with the process."""
_BLOCK_TOKENS = 32


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
        adapters, takes_pictures = self.adapters, Feature.PICTURES in self.features
        for request in requests:
            check_request(
                request,
                max_context=self.max_context,
                vocab_size=self.vocab_size,
                adapters=adapters,
                takes_pictures=takes_pictures,
            )
        flights = [Flight(request, on_delta) for request in requests]
        with self.lock:
            if self.is_closed:
                raise EngineError("the router is closed")
            check_ids([request.id for request in requests], self._flights)
            self._flights.update((flight.request.id, flight) for flight in flights)
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
        options = {} if adapter is None else {"adapter": adapter}
        return self._spread("score", sequences, temperature, timeout_s, timeout_s=timeout_s, **options)

    def embed(self, sequences: Sequence[TokenIds], timeout_s: float = 600.0) -> list[Floats]:
        return self._spread("embed", sequences, timeout_s, timeout_s=timeout_s)

    def _spread(self, method: str, sequences: Sequence[TokenIds], *args: Any, **kwargs: Any) -> list[Floats]:
        """Split over the replicas. Reading has no state, so a part whose replica dies is done again."""
        replicas = self.ready_or_fail()
        count = len(replicas)
        parts = {replica: list(sequences[i::count]) for i, replica in enumerate(replicas)}

        def read(replica: ReplicaProcess) -> Any:
            part = parts[replica]
            try:
                return replica.call(method, part, *args, **kwargs) if part else []
            except PeerDiedError:
                return self.ready_or_fail()[0].call(method, part, *args, **kwargs)

        found: list[Any] = [None] * len(sequences)
        for i, values in enumerate(self.each(read, replicas)):
            if values is None:
                raise EngineError(f"two replicas died under {method}()")
            found[i::count] = values
        return found

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        with self.lock:
            wanted = set(self._flights if request_ids is None else request_ids)
            parked = [f for f in self._waiting if f.request.id in wanted]
            self._waiting = [f for f in self._waiting if f not in parked]
            for request_id in wanted & self._flights.keys():
                self._flights[request_id].is_aborted = True
        for flight in parked:
            self._end(flight, flight.aborted())
        ids = None if request_ids is None else sorted(wanted)
        for replica in self.ready():
            with suppress(RillError):  # it died: its requests end as aborted
                replica.abort(ids)

    # --- control -----------------------------------------------------------------------------------------

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        super().update_weights(tensors, version, partial=partial)
        with self.lock:
            self._prefixes.forget()

    def flush(self) -> None:
        with self.lock:
            self._prefixes.forget()
        self.on_all("flush")

    def stats(self) -> EngineStats:
        """Sums over the replicas that answer; `extra` says how many are ready and how often a request moved."""

        def ask(replica: ReplicaProcess) -> Any:
            with suppress(RillError):
                return replica.call("stats", timeout_s=self.config.health_timeout_s)

        replicas = self.ready()
        found = [stats for stats in self.each(ask, replicas) if stats is not None]
        with self.lock:
            extra = {"replicas": float(len(replicas)), "retried": float(self._num_retried)}
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
        batches: dict[ReplicaProcess, list[Flight]] = {}
        with self.lock:
            for flight in flights:
                replica = self._choose(flight.next_request())
                if replica is None:
                    flight.parked_at = time.monotonic()
                    self._waiting.append(flight)
                    continue
                flight.replica = replica
                replica.num_in_flight += 1
                batches.setdefault(replica, []).append(flight)
        for replica, batch in batches.items():
            with suppress(PeerDiedError):  # then all that it had is sent elsewhere, or ends as aborted
                replica.submit([_recorded(flight) for flight in batch])
                if late := [flight.request.id for flight in batch if flight.is_aborted]:
                    # They were between two replicas when the others were told.
                    replica.abort(late)

    def _choose(self, request: Request) -> ReplicaProcess | None:
        """The replica with most of the prompt in its cache, unless it is much busier than the idlest."""
        ready = self.ready()
        if not ready:
            return None
        chosen = idlest = min(ready, key=lambda r: r.num_in_flight)
        if len(ready) > 1:
            salt = f"{request.adapter or ''}\0{request.cache_salt}"  # what an engine's cache tells apart
            matched = self._prefixes.match(request.token_ids, salt)
            best = max(ready, key=lambda r: (matched.get(r.name, 0), -r.num_in_flight))
            is_worth = matched.get(best.name, 0) * 2 >= len(request.token_ids)
            if is_worth and best.num_in_flight - idlest.num_in_flight <= self.config.load_gap:
                chosen = best
            self._prefixes.insert(request.token_ids, salt, chosen.name)
        return chosen

    def _on_news(self, deltas: list[Delta], ends: list[End]) -> None:
        for delta in deltas:
            if (flight := self._flights.get(delta.request_id)) is not None:
                flight.record(delta)
        for end in ends:
            request_id = end.request_id if isinstance(end, Completion) else end[0]
            if (flight := self._flights.get(request_id)) is not None:
                self._end(flight, flight.joined(end) if isinstance(end, Completion) else end[1])

    def _on_loss(self, replica: ReplicaProcess, reason: PeerDiedError) -> None:
        """Its requests go on elsewhere, unless they were over, or often unlucky."""
        with self.lock:
            self._prefixes.forget(replica.name)
            lost = [flight for flight in self._flights.values() if flight.replica is replica]
        for flight in lost:
            flight.num_losses += 1
            ended = flight.already_ended()
            if ended is not None or flight.is_aborted or self.is_closed:
                self._end(flight, ended or flight.aborted())
            elif flight.num_losses > self.config.max_retries:
                message = f"{flight.num_losses} replicas died under this request; last: {reason}"
                self._end(flight, EngineError(message))
            else:
                flight.restart()
                self._num_retried += 1
                self._dispatch([flight])

    def _end(self, flight: Flight, outcome: Completion | BaseException) -> None:
        with self.lock:
            if self._flights.pop(flight.request.id, None) is None:
                return
            if flight.replica is not None:
                flight.replica.num_in_flight -= 1
        flight.finish(outcome)

    def _on_round(self) -> None:
        """What waits goes to a replica that is back; what has waited too long, or would wait forever, fails."""
        with self.lock:
            limit = time.monotonic() - self.config.start_timeout_s
            is_hopeless = all(map(self.is_given_up, self.slots))
            late = [f for f in self._waiting if is_hopeless or f.parked_at < limit]
            waiting = [f for f in self._waiting if f not in late] if self.ready() else []
            self._waiting = [f for f in self._waiting if f not in late and f not in waiting]
        for flight in late:
            self._end(flight, EngineError("no replica is alive to take this request"))
        self._dispatch(waiting)


def _recorded(flight: Flight) -> Request:
    """As the replica gets it. What nobody streams is told late and in bulk: enough to continue from."""
    request = flight.next_request()
    return request if flight.on_delta is not None else replace(request, delta_interval_s=RECORD_WAIT_S)


class PrefixIndex:
    """Which replica has seen which prefix: a guess about their caches, bounded and least-recently-used; being wrong
    costs a prefill, nothing else. A prompt is cut into blocks; each block's key is chained with the one before it, so
    equal keys mean equal prefixes. Not thread-safe: the router holds its lock around it."""

    def __init__(self, capacity: int = 200_000) -> None:
        self._capacity = capacity
        self._seen_by: OrderedDict[int, set[str]] = OrderedDict()

    def match(self, token_ids: TokenIds, salt: str) -> dict[str, int]:
        """Replica -> tokens of the prompt that it has probably cached. Replicas with none are absent."""
        matched: dict[str, int] = {}
        still: set[str] | None = None
        for key, num_tokens in _keys(token_ids, salt):
            seen = self._seen_by.get(key)
            if seen is None:
                break
            still = set(seen) if still is None else still & seen
            if not still:
                break
            self._seen_by.move_to_end(key)
            matched.update(dict.fromkeys(still, num_tokens))
        return matched

    def insert(self, token_ids: TokenIds, salt: str, replica: str) -> None:
        for key, _ in _keys(token_ids, salt):
            self._seen_by.setdefault(key, set()).add(replica)
            self._seen_by.move_to_end(key)
        while len(self._seen_by) > self._capacity:
            self._seen_by.popitem(last=False)

    def forget(self, replica: str | None = None) -> None:
        """Everything, or everything about one replica."""
        if replica is None:
            self._seen_by.clear()
            return
        for seen in self._seen_by.values():
            seen.discard(replica)


def _keys(token_ids: TokenIds, salt: str) -> Iterator[tuple[int, int]]:
    """(key, tokens up to and including the block). The last block may be short: equal short prompts match too."""
    key = hash(salt)
    for start in range(0, len(token_ids), _BLOCK_TOKENS):
        block = token_ids[start : start + _BLOCK_TOKENS]
        key = hash((key, block.tobytes()))
        yield key, start + len(block)

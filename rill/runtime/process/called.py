"""One remote call, at the called process: what arrived, and its ranks' answers (call.py: the caller, and the picture).

Ranks of one process answer with one message: small results wait for each other; a failure, or a result with large
buffers, goes at once.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rill.runtime.context import current
from rill.runtime.process.call import REPLY
from rill.runtime.process.mailbox import Frames
from rill.runtime.transfer import wire
from rill.runtime.transfer.parcel import Parcels, pack_inline


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it arrived. `process_identity` and `node_id` are the caller's; `reply_to` is its mailbox."""

    call_id: int
    method: str
    reply_to: str
    process_identity: str
    node_id: str
    positions: Sequence[int] | None
    """Which of the process's ranks are called; None: all of them."""
    payload: Frames = field(repr=False)

    @staticmethod
    def read(frames: Frames) -> Call:
        """From the frames after the kind."""
        meta: list[Any] = [*pickle.loads(frames[0]), frames[1:]]
        return Call(*meta)

    def arguments(self, num_ranks: int, parcels: Parcels) -> Callable[[str | None], Any]:
        """What gives each of `num_ranks` called ranks arguments that it may change; those that were on a GPU come to
        the rank's device."""
        if num_ranks > 1:
            return parcels.opener(self.payload)
        return lambda device: parcels.unpack(self.payload, device=device)


class Answers:
    """The answers of one process's ranks to one call. Thread-safe: each rank answers from its own thread."""

    def __init__(self, call: Call, num_ranks: int, send: Callable[[Frames], None]) -> None:
        """`send` takes a message to the caller."""
        self._send = send
        self._call = call
        self._num_left = num_ranks
        self._entries: list[tuple[int, bool, float, Mapping[str, float]]] = []
        self._headers: list[bytes] = []
        self._lock = threading.Lock()

    def value(self, position: int, value: object, seconds: float, timers: Mapping[str, float]) -> None:
        """Answer with a result. What is held back is bytes already: the worker may change its objects."""
        encoded = wire.encode(value)
        if encoded.buffers:
            frames = current().parcels.pack(encoded, [self._call])
            self._post([(position, False, seconds, dict(timers))], [], frames)
            self._add(None, b"", is_urgent=False)
        else:
            self._add((position, False, seconds, dict(timers)), encoded.header, is_urgent=False)

    def error(self, position: int, error: BaseException, seconds: float, timers: Mapping[str, float]) -> None:
        """Answer with an exception: its text and traceback always, the object itself where it can travel."""
        text = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        try:
            encoded = wire.encode((text, trace, error))
            wire.copy_through(error)  # some exceptions pickle but do not unpickle
        except Exception:  # noqa: BLE001  the boundary of user exceptions: they may fail in any way
            encoded = wire.encode((text, trace, None))
        entry = (position, True, seconds, dict(timers))
        if encoded.buffers:
            self._post([entry], [], pack_inline(encoded))
            self._add(None, b"", is_urgent=True)
        else:
            self._add(entry, encoded.header, is_urgent=True)

    def _add(
        self, entry: tuple[int, bool, float, Mapping[str, float]] | None, header: bytes, *, is_urgent: bool
    ) -> None:
        with self._lock:
            self._num_left -= 1
            if entry is not None:
                self._entries.append(entry)
                self._headers.append(header)
            if not self._entries or (self._num_left and not is_urgent):
                return
            entries, self._entries = self._entries, []
            headers, self._headers = self._headers, []
        self._post(entries, headers, [])

    def _post(self, entries: Sequence[Any], headers: Sequence[bytes], frames: Frames) -> None:
        meta = pickle.dumps((self._call.call_id, entries, headers))
        self._send([REPLY, meta, *frames])

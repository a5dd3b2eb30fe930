"""The hub's write-ahead log: requests as they came, written once per poll round, compacted to a snapshot.

`hub.<n>.log` holds length-prefixed records [time, client, raw message] (no client: a tick); `hub.snapshot` holds a
pickle of the Machine and the generation of the log that continues it. A torn last record (the hub was killed while
writing) was never answered, so it is dropped.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rill.runtime.hub.messages import Requests
from rill.runtime.hub.state import Machine

_LENGTH = struct.Struct("<I")
GROWN_BYTES = 32 * 1024 * 1024


class HubJournal:
    def __init__(self, session_dir: Path) -> None:
        self.session_dir = session_dir
        self._snapshot_path = session_dir / "hub.snapshot"
        self._generation = 0
        self._pending: list[bytes] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._fd = -1
        self._num_bytes = 0
        self._grown_bytes = GROWN_BYTES

    def recover(self) -> Machine:
        """The machine as it was when the last hub of this session ended."""
        machine = Machine()
        if self._snapshot_path.exists():
            self._generation, machine = pickle.loads(self._snapshot_path.read_bytes())
        decoder = msgspec.msgpack.Decoder()
        messages = msgspec.msgpack.Decoder(Requests)
        good_bytes = 0
        for end, record in self._records():
            now_s, client, raw = decoder.decode(record)
            if not client:
                machine.tick(now_s)
            else:
                message = messages.decode(raw)
                machine.apply(client, message.first_seq, message.requests, now_s)
            good_bytes = end
        self._open_log(good_bytes)
        machine.touched.update(machine.streams)
        return machine

    def append(self, client: str, raw: bytes, now_s: float) -> None:
        """A batch of requests, exactly as the client sent it; without a client: time has passed."""
        record = self._encoder.encode((now_s, client, raw))
        self._pending += (_LENGTH.pack(len(record)), record)

    def commit(self) -> None:
        """Write what was appended, in one call. Only afterwards may anything be sent."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        self._num_bytes += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    @property
    def is_grown(self) -> bool:
        return self._num_bytes > self._grown_bytes

    def compact(self, machine: Machine) -> None:
        """Replace the log by a snapshot; a kill in between leaves one whole pair."""
        assert not self._pending
        old_log = self._log_path
        self._generation += 1
        data = pickle.dumps((self._generation, machine), protocol=5)
        temporary = self._snapshot_path.with_suffix(".new")
        temporary.write_bytes(data)
        os.close(self._fd)
        self._open_log(0)
        temporary.replace(self._snapshot_path)
        old_log.unlink(missing_ok=True)
        self._grown_bytes = max(GROWN_BYTES, 4 * len(data))

    def close(self) -> None:
        os.close(self._fd)

    @property
    def _log_path(self) -> Path:
        return self.session_dir / f"hub.{self._generation}.log"

    def _open_log(self, num_bytes: int) -> None:
        self._fd = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, num_bytes)
        os.lseek(self._fd, 0, os.SEEK_END)
        self._num_bytes = num_bytes

    def _records(self) -> Iterator[tuple[int, Any]]:
        if not self._log_path.exists():
            return
        data = memoryview(self._log_path.read_bytes())
        offset = 0
        while offset + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, offset)
            end = offset + _LENGTH.size + length
            if end > len(data):
                return
            yield end, data[offset + _LENGTH.size : end]
            offset = end

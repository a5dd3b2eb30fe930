"""The token log of one process: every sampled token, and every effect outside of the model, on disk before it is used.

    engine's thread ── tokens ──▶ ┐                                 ┌─▶ files in RUN/journal/ ◀── syncer's thread
                                  ├─ pending ──▶ writer's thread ───┤
    episodes        ── events ──▶ ┘   (delay_s at most)             └─▶ whoever waits for what was written

Commits are grouped: tokens wait for others up to `delay_s`; the end of a sequence, and a tool's result, do not wait. A
record that is handed to the operating system survives the process; `sync_s` bounds what a lost machine costs, and has a
thread of its own: nobody waits for a slow disk. A full disk does not end the run: the log waits for room, says so, and
sampling waits for the log, `FULL_TIMEOUT_S` at most.

Each process writes files of its own, and holds a lock on the newest for as long as it lives: so others can tell what
the dead have left (reader.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rill.config import Config
from rill.errors import JournalError
from rill.journal import records
from rill.journal.records import Event, Experts, Finished, Opened, Said
from rill.telemetry.jsonl import FULL_TIMEOUT_S, RETRY_S
from rill.types import Floats, Ints, Picture, TokenIds

log = logging.getLogger(__name__)

FOLDER, SUFFIX = "journal", ".log"
PICTURES = "pictures"
"""The event that a sequence begins with whose prompt shows some: [start, tokens, hash] each."""
WRITER_SHARE = 0.25
"""Of `delay_s`, in which the writer waits for more; for the rest sequences collect their tokens."""
SPREAD = 0.25
"""By how much of that their times differ."""


class JournalConfig(Config):
    """[journal]: the token log; written by the processes of rollout, env and the controller."""

    enabled: bool = True
    """Off: what was sampled after the last checkpoint, or on an engine that dies, is sampled again."""
    delay_s: float = Field(1.0, ge=0)
    """How long a token may wait before it is written: what a killed engine loses of each answer."""
    sync_s: float = Field(1.0, ge=0)
    """How long what is written may wait before it would survive a loss of power. 0: the operating system decides."""
    segment_bytes: int = Field(16 << 20, ge=1 << 10)
    """Size at which a file is ended and the next begun."""
    keep: bool = False
    """Keep files that no checkpoint needs any more, to prove afterwards what was trained on. Off: they are removed once
    all their groups are trained on, or dropped, and the oldest checkpoint was taken after that."""


class TokenLog:
    def __init__(self, run_dir: Path, process: str, config: JournalConfig) -> None:
        """`process`: its name in the run, as in "rollout-0"."""
        self.folder = run_dir / FOLDER
        self._process = process
        self._config = config
        self._pending: list[Opened | Said | Finished | Experts | Event | bytes] = []
        self._waiting: list[Callable[[JournalError | None], None]] = []
        self._changed = threading.Condition()
        """Guards what is pending."""
        self._writing = threading.Lock()
        """Held while a commit is under way, so that records are in the order in which they came."""
        self._is_urgent = False
        self._is_closed = False
        self._closing = threading.Event()
        self._next_number = 0
        self._newest_s = 0.0
        self._size = 0
        self._fd = -1
        self._unsynced: list[int] = []
        """Descriptors of files that are ended."""
        self._failure: JournalError | None = None
        """Something could not be written: what would come after it has a gap before it."""
        self._begin_files()
        self._threads = [threading.Thread(target=self._run, name="token-log", daemon=True)]
        if config.sync_s:
            self._threads.append(threading.Thread(target=self._run_sync, name="token-log-sync", daemon=True))
        for thread in self._threads:
            thread.start()

    # --- sequences ----------------------------------------------------------------------------------------

    def open(
        self,
        sequence_id: str,
        *,
        num_prompt: int,
        base: int,
        pictures: Sequence[Picture] = (),
        after_s: float = 0.0,
    ) -> int:
        """A sequence begins behind `base` tokens that the log has already, and later than `after_s`, whatever the clock
        says; its number in this log. Of pictures in its prompt the log has their places and hashes."""
        with self._changed:
            number = self._next_number
            self._next_number += 1
            self._newest_s = max(time.time(), self._newest_s, math.nextafter(after_s, math.inf))
            self._pending.append(Opened(number, self._newest_s, base, num_prompt, sequence_id))
            if pictures:
                places = [[picture.start, picture.num_tokens, picture.key] for picture in pictures]
                self._pending.append(Event(sequence_id, PICTURES, places))
        return number

    def collect_s(self, nth: int) -> float:
        """How long the nth of sequences that begin together collects tokens before it hands them over. They differ, so
        that no step of the engine has the work of all."""
        return self._config.delay_s * (1 - WRITER_SHARE) * (1 - SPREAD * (nth * 0.618 % 1))

    def tokens(self, number: int, token_ids: TokenIds, logprobs: Floats, versions: Ints) -> None:
        """By the engine's thread, which must not wait: they are written a moment later."""
        said = Said(number, token_ids, logprobs, versions)
        with self._changed:
            self._pending.append(said)

    def finish(self, finished: Finished, experts: Any, then: Callable[[JournalError | None], None]) -> None:
        """A sequence ends; `then` is called by the writer's thread once all of it is written, or cannot be."""
        with self._changed:
            if experts is not None:
                self._pending.append(Experts(finished.number, experts))
            self._pending.append(finished)
            self._waiting.append(then)
            self._is_urgent = True
            self._changed.notify()

    # --- events -------------------------------------------------------------------------------------------

    def event(self, of: str, key: str, value: Any) -> None:
        """Written when this returns. JournalError: it could not be; TypeError: the value is not plain."""
        record = records.encode(Event(of, key, value))
        with self._changed:
            self._pending.append(record)
        self.flush()

    def flush(self) -> None:
        """Everything so far is written when this returns."""
        error = self._commit()
        if error is not None:
            raise error

    def hand_over(self) -> None:
        """What is written becomes what a process that is gone has left: whoever takes it up again, this process too,
        goes on from it (reader.py). Nothing may be under way."""
        self.flush()
        with self._writing:
            self._begin_files()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._threads[0].join(timeout=10.0)
        self._commit()
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=10.0)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- inside -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_urgent or self._is_closed, WRITER_SHARE * self._config.delay_s
                )
            self._commit()

    def _run_sync(self) -> None:
        """Until what was written before the end is safe too."""
        synced = 0
        while True:
            is_last = self._closing.wait(self._config.sync_s)
            with self._writing:
                fds, self._unsynced = self._unsynced, []
                if fds or self._size != synced:
                    fds.append(os.dup(self._fd))
                synced = self._size
            for fd in fds:
                try:
                    os.fdatasync(fd)
                except OSError as error:
                    log.warning("the token log in %s cannot be synced: %s", self.folder, error.strerror)
                os.close(fd)
            if is_last:
                return

    def _commit(self) -> JournalError | None:
        """Write what is pending, and tell those who wait for it."""
        with self._writing:
            with self._changed:
                pending, self._pending = self._pending, []
                waiting, self._waiting = self._waiting, []
                self._is_urgent = False
            error = self._failure or (self._write(encode(pending)) if pending else None)
        for then in waiting:
            then(error)
        return error

    def _write(self, content: bytes) -> JournalError | None:
        """All of it: what a full disk cuts off is taken back and tried again. Where that is in vain, it is the end."""
        deadline_s = time.monotonic() + FULL_TIMEOUT_S
        is_told = False
        while True:
            try:
                if is_told:
                    os.ftruncate(self._fd, self._size)
                if self._size >= self._config.segment_bytes:
                    self._begin_segment()
                _write_all(self._fd, content)
                self._size += len(content)
                return None
            except OSError as error:
                told = f"the token log in {self.folder} cannot be written: {error.strerror}"
                if time.monotonic() > deadline_s or self._is_closed:
                    self._failure = JournalError(f"{told}. Make room, then resume the run")
                    return self._failure
                if not is_told:
                    log.warning(
                        "%s; sampling waits for up to %.0f s until there is room", told, FULL_TIMEOUT_S
                    )
                    is_told = True
                time.sleep(RETRY_S)

    def _begin_files(self) -> None:
        """Named by a time that is later than that of all files there, though the clock may have gone back."""
        began = [int(path.stem.rsplit("-", 3)[1], 16) for path in self.folder.glob(f"*{SUFFIX}")]
        self._stem = f"{self._process}-{max(time.time_ns(), *began, 0) + 1:x}-{os.getpid()}"
        self._num_segments = 0
        self._begin_segment()

    def _begin_segment(self) -> None:
        """The next file, held before anybody can see it, and before the last one is let go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self._stem}-{self._num_segments:05d}{SUFFIX}"
        draft = path.with_suffix(".draft")
        fd = os.open(draft, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # a file system without locks: the file only looks older than it is
                log.info("%s cannot be locked", path)
            _write_all(fd, records.MAGIC)
            draft.rename(path)
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0 and self._config.sync_s:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # the syncer has it open for a while
            self._unsynced.append(self._fd)
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size = fd, len(records.MAGIC)
        self._num_segments += 1


def _write_all(fd: int, content: bytes) -> None:
    """Also where a write takes a part only."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]


def encode(items: Sequence[Opened | Said | Finished | Experts | Event | bytes]) -> bytes:
    """In their order; tokens that follow each other are one record. Bytes are records already."""
    parts: list[bytes] = []
    said: list[Said] = []
    for item in items:
        if isinstance(item, Said):
            said.append(item)
            continue
        if said:
            parts += records.encode_tokens(said)
            said = []
        parts.append(item if isinstance(item, bytes) else records.encode(item))
    if said:
        parts += records.encode_tokens(said)
    return b"".join(parts)

"""The token log on disk: what a record looks like, and how a file of them is read while it is written.

    segment   MAGIC, then records
    record    length u32 │ crc32 u32 │ kind u8 │ payload                      (little endian throughout)

    OPEN      a sequence begins: number, time, base, prompt length, its id. `base` counts the tokens that it goes on
              behind, which earlier attempts in this or other files have.
    TOKENS    tokens of any number of sequences, all of one version: numbers u32, counts u16, tokens i32, logprobs f32.
              That is 14 bytes for a sequence's only token of a commit, and 8 for each further one.
    FINISH    a sequence ends: number, tokens of this attempt, why, the stop string, and the tokens that were not
              written before: the last token and the end are one record, so that nothing is continued behind its end
    EXPERTS   a sequence's routed experts, where the engine records them
    EVENT     anything that happens outside of the model, as JSON: of whom, key, value

A killed writer leaves at most one cut record, at the end. Anything else that is no whole record is damage: it is told,
and reading goes on at the next whole record. Called by the writer (token_log.py) and the reader (reader.py).
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rill.types import Floats, Ints, StopReason, TokenIds

MAGIC = b"RILLLOG1"
_HEAD = struct.Struct("<IIB")
_OPEN = struct.Struct("<IdII")
_TOKENS = struct.Struct("<iI")
_FINISH = struct.Struct("<IIBhIB")
_EXPERTS = struct.Struct("<I3I4s")
_MOST = 0xFFFF
"""Tokens of one sequence in one entry."""
_REASONS = tuple(StopReason)


class Kind(IntEnum):
    OPEN = 1
    TOKENS = 2
    FINISH = 3
    EXPERTS = 4
    EVENT = 5


class Opened(NamedTuple):
    number: int
    time_s: float
    base: int
    num_prompt: int
    id: str


class Said(NamedTuple):
    """Tokens that one sequence gained, to be written."""

    number: int
    token_ids: TokenIds
    logprobs: Floats
    versions: Ints


class Entry(NamedTuple):
    """Of those, as they are read: all of one version."""

    number: int
    version: int
    token_ids: TokenIds
    logprobs: Floats


class Finished(NamedTuple):
    number: int
    num_tokens: int
    """Of this attempt. A stop string that was found late may have taken some back."""
    reason: StopReason
    stop_text: str | None
    token_ids: TokenIds
    logprobs: Floats
    versions: Ints
    """Of the tokens that no TOKENS record holds."""


class Experts(NamedTuple):
    number: int
    experts_TLK: npt.NDArray[Any]


class Event(NamedTuple):
    of: str
    """An episode, a group, or "controller"."""
    key: str
    value: Any


class Lost(NamedTuple):
    """In place of what is damaged: whatever was under way may lack tokens from here on."""


Record = Opened | list[Entry] | Finished | Experts | Event | Lost


# --- writing -----------------------------------------------------------------------------------------------


def encode(record: Opened | Finished | Experts | Event) -> bytes:
    match record:
        case Opened():
            head = _OPEN.pack(record.number, record.time_s, record.base, record.num_prompt)
            return _record(Kind.OPEN, head + record.id.encode())
        case Finished():
            return _record(Kind.FINISH, _encode_finish(record))
        case Experts():
            array = np.ascontiguousarray(record.experts_TLK)
            head = _EXPERTS.pack(record.number, *array.shape, array.dtype.str.encode().ljust(4))
            return _record(Kind.EXPERTS, head + array.tobytes())
        case Event():
            return _record(Kind.EVENT, json.dumps(list(record), separators=(",", ":")).encode())


def encode_tokens(said: Sequence[Said]) -> list[bytes]:
    """In their order; a record for each run of one version. Whole columns at a time: an engine's thread pays for it."""
    counts = np.array([len(one.token_ids) for one in said])
    if not counts.sum():
        return []
    ids_T = np.concatenate([one.token_ids for one in said]).astype("<i4", copy=False)
    logprobs_T = np.concatenate([one.logprobs for one in said]).astype("<f4", copy=False)
    versions_T = np.concatenate([one.versions for one in said])
    ends = np.cumsum(counts)
    changes = np.flatnonzero(versions_T[1:] != versions_T[:-1]) + 1
    pieces = [np.arange(start, end, _MOST) for start, end in zip(ends - counts, ends) if end - start > _MOST]
    starts_E = np.unique(np.concatenate([(ends - counts)[counts > 0], changes, *pieces]))  # E entry
    numbers_E = np.array([one.number for one in said], "<u4")[np.searchsorted(ends, starts_E, side="right")]
    counts_E = np.diff(starts_E, append=len(ids_T)).astype("<u2")
    records = []
    for start, end in pairwise([0, *changes.tolist(), len(ids_T)]):
        first, last = np.searchsorted(starts_E, (start, end)).tolist()
        columns = (numbers_E[first:last], counts_E[first:last], ids_T[start:end], logprobs_T[start:end])
        head = _TOKENS.pack(int(versions_T[start]), last - first)
        records.append(_record(Kind.TOKENS, b"".join([head, *(column.tobytes() for column in columns)])))
    return records


def _encode_finish(finished: Finished) -> bytes:
    text = b"" if finished.stop_text is None else finished.stop_text.encode()
    versions = np.asarray(finished.versions, "<i4")
    is_one = len(versions) > 0 and bool((versions == versions[0]).all())
    head = _FINISH.pack(
        finished.number,
        finished.num_tokens,
        _REASONS.index(finished.reason),
        -1 if finished.stop_text is None else len(text),
        len(finished.token_ids),
        is_one,
    )
    columns = (
        np.asarray(finished.token_ids, "<i4"),
        np.asarray(finished.logprobs, "<f4"),
        versions[:1] if is_one else versions,
    )
    return b"".join([head, text, *(column.tobytes() for column in columns)])


def _record(kind: Kind, payload: bytes) -> bytes:
    crc = zlib.crc32(payload, kind)
    return _HEAD.pack(len(payload), crc, kind) + payload


# --- reading -----------------------------------------------------------------------------------------------


class Tail(Enum):
    """What may stand at the end of a file and is no whole record."""

    GROWING = auto()
    """Its writer lives: anything; the rest is on its way."""
    CUT = auto()
    """Its writer is gone: the beginning of a record."""
    WHOLE = auto()
    """Its writer went on to the next file: nothing."""


@dataclass(slots=True)
class Segment:
    """One file, read as far as it is there. `read` goes on where the last one ended."""

    path: Path
    offset: int = 0
    damages: list[str] = field(default_factory=list)

    def read(self, tail: Tail = Tail.CUT) -> Iterator[Record]:
        """The records that came since."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                content = file.read()
        except FileNotFoundError:  # compacted away
            return
        begin, start = self.offset, 0
        if begin == 0 and content.startswith(MAGIC):
            start = len(MAGIC)
        while start < len(content):
            if (end := _end_of(content, start)) is not None:
                self.offset = begin + end
                payload = content[start + _HEAD.size : end]
                start, kind = end, Kind(content[start + _HEAD.size - 1])
                yield _decode(kind, payload)
                continue
            next_start = _next_whole(content, start + 1)
            is_cut = MAGIC.startswith(content) if begin + start == 0 else _is_cut(content, start)
            if next_start is None and (tail is Tail.GROWING or (tail is Tail.CUT and is_cut)):
                return
            next_start = len(content) if next_start is None else next_start
            self.damages.append(
                f"the checksum of the record at byte {begin + start} is wrong, {next_start - start} bytes are lost"
            )
            start, self.offset = next_start, begin + next_start
            yield Lost()


_KINDS = re.compile(b"[" + bytes(Kind) + b"]")


def _said_end(content: bytes, start: int) -> int | None:
    """Where the record ends that seems to begin here; None: none does."""
    if start + _HEAD.size > len(content):
        return None
    length, _, kind = _HEAD.unpack_from(content, start)
    return start + _HEAD.size + length if length and kind in iter(Kind) else None


def _end_of(content: bytes, start: int) -> int | None:
    """Where the record ends that begins here; None: it is not whole."""
    end = _said_end(content, start)
    if end is None or end > len(content):
        return None
    _, crc, kind = _HEAD.unpack_from(content, start)
    return end if zlib.crc32(memoryview(content)[start + _HEAD.size : end], kind) == crc else None


def _is_cut(content: bytes, start: int) -> bool:
    end = _said_end(content, start)
    return start + _HEAD.size > len(content) or (end is not None and end > len(content))


def _next_whole(content: bytes, start: int) -> int | None:
    """Where the next whole record begins. What has none behind it is not looked at: checksums take their time."""
    for match in _KINDS.finditer(content, start + _HEAD.size - 1):
        found = match.start() - _HEAD.size + 1
        end = _said_end(content, found)
        if end is None or end > len(content):
            continue
        is_followed = end + _HEAD.size > len(content) or _KINDS.match(content, end + _HEAD.size - 1)
        if is_followed and _end_of(content, found) is not None:
            return found
    return None


def _decode(kind: Kind, payload: bytes) -> Record:
    match kind:
        case Kind.OPEN:
            number, time_s, base, num_prompt = _OPEN.unpack_from(payload)
            return Opened(number, time_s, base, num_prompt, payload[_OPEN.size :].decode())
        case Kind.TOKENS:
            return _decode_tokens(payload)
        case Kind.FINISH:
            return _decode_finish(payload)
        case Kind.EXPERTS:
            number, *shape, dtype = _EXPERTS.unpack_from(payload)
            flat = np.frombuffer(payload, np.dtype(dtype.decode().strip()), offset=_EXPERTS.size)
            return Experts(number, flat.reshape(shape))
        case Kind.EVENT:
            return Event(*json.loads(payload))


def _decode_finish(payload: bytes) -> Finished:
    number, num_tokens, reason, text_length, count, is_one = _FINISH.unpack_from(payload)
    at = _FINISH.size
    text = None if text_length < 0 else payload[at : at + text_length].decode()
    at += max(0, text_length)
    tokens = np.frombuffer(payload, "<i4", count, at)
    logprobs = np.frombuffer(payload, "<f4", count, at + 4 * count)
    versions = np.frombuffer(payload, "<i4", 1 if is_one else count, at + 8 * count)
    versions = np.repeat(versions, count) if is_one else versions
    return Finished(number, num_tokens, _REASONS[reason], text, tokens, logprobs, versions)


def _decode_tokens(payload: bytes) -> list[Entry]:
    version, num_entries = _TOKENS.unpack_from(payload)
    at = _TOKENS.size
    numbers = np.frombuffer(payload, "<u4", num_entries, at)
    counts = np.frombuffer(payload, "<u2", num_entries, at + 4 * num_entries)
    at += 6 * num_entries
    total = int(counts.sum())
    tokens = np.frombuffer(payload, "<i4", total, at)
    logprobs = np.frombuffer(payload, "<f4", total, at + 4 * total)
    ends = np.cumsum(counts, dtype=np.int64)
    return [
        Entry(int(number), version, tokens[end - count : end], logprobs[end - count : end])
        for number, count, end in zip(numbers.tolist(), counts.tolist(), ends.tolist())
    ]

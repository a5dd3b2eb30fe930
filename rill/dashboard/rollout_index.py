"""The index of one rollout log: a row for every group and every sample, and the text to search in.

Written by the indexer's process, read by `rollouts`. The log itself is read only for the groups that somebody opens.

    groups.bin     one row a group: where it lies in the log, its step, task, prompt, rewards
    samples.bin    one row a sample: reward, lengths, why it stopped, tags
    previews.bin   the beginning of each group's prompt
    text.bin       prompt and answers of every group in lower case, one after another
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rill.dashboard.log_index import IndexState, LogIndex
from rill.dashboard.log_reader import Block
from rill.telemetry.rollouts import GroupRecord, SampleRecord

EVALUATION = "evaluation: "
"""Begins the data set of groups that answer an evaluation's prompts."""
PREVIEW_BYTES = 160
MAX_TEXT_BYTES = 1024 * 1024
"""Of one sample, that can be searched."""
MAX_TAGS = 64
GROUP = np.dtype([
    ("offset", "<u8"), ("length", "<u4"), ("version", "<i4"), ("prompt", "<u8"), ("text", "<u8"),
    ("first_sample", "<u4"), ("num_samples", "<u2"), ("task", "<u2"), ("reward", "<f4"), ("spread", "<f4"),
    ("is_dropped", "?"),
])  # fmt: skip
SAMPLE = np.dtype([
    ("tags", "<u8"), ("group", "<u4"), ("num_sampled", "<u4"), ("num_tokens", "<u4"), ("reward", "<f4"), ("stop", "u1"),
    ("is_failed", "?"),
])  # fmt: skip
PREVIEW = np.dtype([("text", f"S{PREVIEW_BYTES}")])


class RolloutState(IndexState, kw_only=True):
    tasks: list[str] = []
    stops: list[str] = []
    tags: list[str] = []


_decoder = msgspec.json.Decoder(GroupRecord)


def id_code(name: str) -> int:
    """Of a prompt or a sample; the same in every log."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class RolloutIndex(LogIndex[RolloutState]):
    state_type = RolloutState

    def __init__(self, log: Path, folder: Path, state: RolloutState, *, is_writer: bool = False) -> None:
        super().__init__(log, folder, state, is_writer=is_writer)
        self.groups = self._table("groups", GROUP)
        self.samples = self._table("samples", SAMPLE)
        self.previews = self._table("previews", PREVIEW)
        self.text = self._table("text", np.dtype("u1"))

    def add(self, block: Block) -> None:
        groups: list[tuple[Any, ...]] = []
        samples: list[tuple[Any, ...]] = []
        previews: list[tuple[bytes]] = []
        texts: list[bytes] = []
        text_at = self.text.num_rows
        for offset, line in block.lines:
            try:
                record = _decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            prompt = record.samples[0].prompt[:MAX_TEXT_BYTES] if record.samples else ""
            said = [sample.response[:MAX_TEXT_BYTES] for sample in record.samples]
            text = "\x00".join([prompt, *said]).lower().encode("utf-8", "replace") + b"\x00"
            rewards = [sample.score for sample in record.samples]
            groups.append(
                (
                    offset,
                    len(line),
                    record.version,
                    id_code(record.prompt_id),
                    text_at,
                    self.samples.num_rows + len(samples),
                    len(record.samples),
                    _code(
                        self.state.tasks,
                        f"{EVALUATION}{record.evaluates}" if record.evaluates else record.task,
                    ),
                    sum(rewards) / len(rewards) if rewards else math.nan,
                    max(rewards) - min(rewards) if rewards else 0.0,
                    bool(record.dropped),
                )
            )
            samples += [self._sample(s, len(groups) - 1, record.tags) for s in record.samples]
            cut = prompt.encode("utf-8", "replace")[:PREVIEW_BYTES].decode("utf-8", "ignore")
            previews.append((cut.encode(),))
            texts.append(text)
            text_at += len(text)
        self.groups.append(np.array(groups, dtype=GROUP))
        self.samples.append(np.array(samples, dtype=SAMPLE))
        self.previews.append(np.array(previews, dtype=PREVIEW))
        self.text.append(np.frombuffer(b"".join(texts), np.uint8))

    def _sample(self, sample: SampleRecord, group: int, group_tags: list[str]) -> tuple[Any, ...]:
        codes = (_code(self.state.tags, tag, MAX_TAGS - 1) for tag in {*sample.tags, *group_tags})
        return (
            sum(1 << code for code in set(codes)),
            self.groups.num_rows + group,
            len(sample.sampled) - sample.sampled.count(0),
            sample.num_tokens or len(sample.tokens),
            sample.score,
            _code(self.state.stops, sample.stop, 255),
            bool(sample.error),
        )


def _code(words: list[str], word: str, last: int = 65_535) -> int:
    """Where the word stands in the list; it is added if it is new. A full list's last place stands for all others."""
    try:
        return words.index(word)
    except ValueError:
        if len(words) > last:
            return last
        words.append(word)
        return len(words) - 1

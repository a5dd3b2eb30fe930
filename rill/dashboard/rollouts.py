"""Browsing rollouts: which groups match, in which order, and one group in full; over all rollout logs of a run.

Called by the server with a Query. Filters look at the index only. Searching text takes bounded time: an answer says
how far it came, and the next question goes on from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rill.dashboard.rollout_index import EVALUATION, RolloutIndex, id_code
from rill.dashboard.table import Count, Number, Whole, read_range
from rill.dashboard.trained_index import TrainedIndex
from rill.errors import UserError

MAX_ROWS = 500
SEARCH_S = 0.08
SEARCH_BYTES = 32 * 1024
SEARCH_HITS = 60
"""An answer to a search ends with the part of the text in which it has found so many."""
ORDERS = ("newest", "oldest", "best", "worst", "spread", "longest")

Mask = npt.NDArray[np.bool_]


class Query(
    msgspec.Struct,
    kw_only=True,
    rename={"from_step": "from", "to_step": "to", "min_reward": "min", "max_reward": "max"},
):
    """What is looked for, under the names that an address has for it. None and "" mean: any."""

    from_step: Whole | None = None
    to_step: Whole | None = None
    task: str = ""
    prompt: str = ""
    stop: str = ""
    tag: str = ""
    min_reward: Number | None = None
    max_reward: Number | None = None
    only: str = ""
    """ "failed" or "dropped"."""
    text: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    searched: Count = 0
    """Bytes of text that an earlier question has looked through, from the newest back."""
    order: str = "newest"
    first: Count = 0
    count: Count = 50


class Rollouts:
    """All rollout indexes of one run at one moment."""

    def __init__(self, indexes: Sequence[RolloutIndex], trained: Sequence[TrainedIndex] = ()) -> None:
        """`trained`: what the trainer knows of the same samples."""
        self._trained = trained
        self.indexes = [index for index in indexes if index.groups.num_rows]
        self._tables: dict[int, Any] = {}
        self.num_samples = sum(index.samples.num_rows for index in self.indexes)
        self.num_groups = sum(index.groups.num_rows for index in self.indexes)

    def facets(self) -> dict[str, Any]:
        """What can be chosen: steps with how many groups of training and which reward, data, stop reasons, tags."""
        tables = [
            table[~np.isin(table["task"], _evaluations(index))]
            for index, table in zip(self.indexes, map(self._groups, range(len(self.indexes))))
        ]
        versions = np.concatenate([np.empty(0, np.int32), *(groups["version"] for groups in tables)])
        means = np.concatenate([np.empty(0, np.float32), *(groups["reward"] for groups in tables)])
        steps, inverse, counts = np.unique(versions - 1, return_inverse=True, return_counts=True)
        rewards = np.bincount(inverse, np.nan_to_num(means), len(steps))
        return {
            "num_groups": self.num_groups,
            "num_samples": self.num_samples,
            "steps": [
                [int(step), int(count), round(float(total) / int(count), 4)]
                for step, count, total in zip(steps, counts, rewards)
            ],
            "tasks": sorted({task for index in self.indexes for task in index.state.tasks}),
            "stops": sorted({stop for index in self.indexes for stop in index.state.stops}),
            "tags": sorted({tag for index in self.indexes for tag in index.state.tags}),
        }

    def find(self, query: Query) -> dict[str, Any]:
        if query.order not in ORDERS:
            raise UserError(f"order {query.order!r}: one of {', '.join(ORDERS)}")
        found, rows = [], []
        searched, text_bytes = query.searched, sum(index.text.num_rows for index in self.indexes)
        masks = [self._mask(log, query) for log in range(len(self.indexes))]
        if query.text:
            masks, searched = self._search(masks, query)
        for log, mask in enumerate(masks):
            places = np.flatnonzero(mask)
            found.append(np.stack([np.full(len(places), log), places], axis=1))
            rows.append(self._groups(log)[places])
        if not found:
            return {"total": 0, "groups": [], "searched": 0, "text_bytes": 0}
        where, groups = np.concatenate(found), np.concatenate(rows)
        order = _order(groups, query.order)
        shown = order[query.first : query.first + min(MAX_ROWS, query.count)]
        return {
            "total": len(order),
            "groups": self._shown(where[shown], groups[shown]),
            "searched": searched,
            "text_bytes": text_bytes,
        }

    def group(self, log: int, place: int) -> dict[str, Any]:
        """One group as it stands in the log, with what the trainer knows of its samples."""
        if not (0 <= log < len(self.indexes) and 0 <= place < self.indexes[log].groups.num_rows):
            raise UserError(f"there is no group {place} in log {log}")
        index = self.indexes[log]
        row = index.groups.read(place, place + 1)[0]
        line = read_range(index.log, int(row["offset"]), int(row["length"]))
        try:
            record: dict[str, Any] = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UserError(f"{index.log.name} was changed after it was indexed: reload the page") from error
        names = [str(sample.get("id", "")) for sample in record["samples"]]
        for trained in self._trained:
            found = trained.find(names)
            for name, sample in zip(names, record["samples"], strict=True):
                sample.update(found.get(name, {}))
        return {**record, "step": int(row["version"]) - 1, "log": log, "place": place}

    def prompt(self, prompt_id: str) -> list[dict[str, Any]]:
        """One prompt over training: its groups, by step."""
        code = id_code(prompt_id)
        found: list[dict[str, Any]] = []
        for log in range(len(self.indexes)):
            groups = self._groups(log)
            places = np.flatnonzero(groups["prompt"] == np.uint64(code))
            found += self._rows(log, places, groups[places])
        return sorted(found, key=lambda row: (row["step"], row["log"], row["place"]))

    def _shown(self, where: npt.NDArray[Any], groups: npt.NDArray[Any]) -> list[dict[str, Any]]:
        """The rows of (log, place), in their order; each log is read in one go."""
        rows: dict[int, dict[str, Any]] = {}
        for log in np.unique(where[:, 0]).tolist():
            own = np.flatnonzero(where[:, 0] == log)
            rows |= dict(zip(own.tolist(), self._rows(log, where[own, 1], groups[own]), strict=True))
        return [rows[i] for i in range(len(where))]

    def _rows(self, log: int, places: npt.NDArray[Any], groups: npt.NDArray[Any]) -> list[dict[str, Any]]:
        if not len(places):
            return []
        index = self.indexes[log]
        first = groups["first_sample"].astype(np.int64)
        samples = index.samples.read_many(zip(first.tolist(), (first + groups["num_samples"]).tolist()))
        previews = index.previews.read_many((place, place + 1) for place in places.tolist())
        return [
            self._row(log, place, group, own, preview[0]["text"])
            for place, group, own, preview in zip(places.tolist(), groups, samples, previews, strict=True)
        ]

    def _row(self, log: int, place: int, group: Any, samples: Any, preview: bytes) -> dict[str, Any]:
        index = self.indexes[log]
        return {
            "log": log,
            "place": place,
            "step": int(group["version"]) - 1,
            "task": index.state.tasks[int(group["task"])],
            "preview": preview.decode("utf-8", "replace"),
            "reward": _plain(float(group["reward"])),
            "rewards": [_plain(reward) for reward in samples["reward"].tolist()],
            "stops": [index.state.stops[stop] for stop in samples["stop"].tolist()],
            "num_sampled": samples["num_sampled"].tolist(),
            "num_failed": int(samples["is_failed"].sum()),
            "is_dropped": bool(group["is_dropped"]),
        }

    def _groups(self, log: int) -> Any:
        """All groups of a log, read once."""
        if log not in self._tables:
            self._tables[log] = self.indexes[log].groups.read()
        return self._tables[log]

    def _mask(self, log: int, query: Query) -> Mask:
        index, groups = self.indexes[log], self._groups(log)
        mask: Mask = np.ones(len(groups), dtype=bool)
        if query.from_step is not None:
            mask &= groups["version"] > query.from_step
        if query.to_step is not None:
            mask &= groups["version"] <= query.to_step + 1
        if query.task:
            mask &= groups["task"] == _place(index.state.tasks, query.task)
        if query.prompt:
            mask &= groups["prompt"] == np.uint64(id_code(query.prompt))
        if query.only == "dropped":
            mask &= groups["is_dropped"]
        wanted = _sample_filters(index, query)
        if wanted:
            samples = index.samples.read()
            fits = np.logical_and.reduce([test(samples) for test in wanted])
            mask &= np.bincount(samples["group"][fits], minlength=len(groups)) > 0
        return mask

    def _search(self, masks: list[Mask], query: Query) -> tuple[list[Mask], int]:
        """Groups among `masks` whose text holds the words, looked for from each log's end until time is up."""
        needle = query.text.lower().encode("utf-8", "replace")
        deadline = time.monotonic() + SEARCH_S
        hits: list[Mask] = [np.zeros_like(mask) for mask in masks]
        skip, searched = query.searched, 0
        num_found = 0
        for log, (index, mask, hit) in enumerate(zip(self.indexes, masks, hits)):
            if skip >= index.text.num_rows:
                skip -= index.text.num_rows
                searched += index.text.num_rows
                continue
            begins = np.ascontiguousarray(self._groups(log)["text"])
            end = index.text.num_rows - skip
            searched, skip = searched + skip, 0
            while end > 0 and num_found < SEARCH_HITS and time.monotonic() < deadline:
                begin = max(0, end - SEARCH_BYTES)
                text = index.text.read(begin, end + len(needle) - 1).tobytes()
                num_found += _mark(hit, mask, begins, text, begin, needle)
                searched += end - begin
                end = begin
            if end > 0:
                break
        return hits, searched


def _evaluations(index: RolloutIndex) -> list[int]:
    return [code for code, task in enumerate(index.state.tasks) if task.startswith(EVALUATION)]


def _mark(hit: Mask, mask: Mask, begins: npt.NDArray[Any], text: bytes, at: int, needle: bytes) -> int:
    """Set the groups of the mask in which the needle occurs; how many. On from the end of a group that has it."""
    found, count = text.find(needle), 0
    while found >= 0:
        place = int(np.searchsorted(begins, at + found, "right")) - 1
        if mask[place] and not hit[place]:
            hit[place] = True
            count += 1
        if place + 1 >= len(begins):
            break
        found = text.find(needle, max(found + 1, int(begins[place + 1]) - at))
    return count


def _sample_filters(index: RolloutIndex, query: Query) -> list[Callable[[Any], Any]]:
    tests: list[Callable[[Any], Any]] = []
    low, high = query.min_reward, query.max_reward
    if low is not None:
        tests.append(lambda samples: samples["reward"] >= low)
    if high is not None:
        tests.append(lambda samples: samples["reward"] <= high)
    if query.stop:
        tests.append(lambda samples: samples["stop"] == _place(index.state.stops, query.stop))
    if query.tag:
        place = _place(index.state.tags, query.tag)
        bit = np.uint64(1 << place) if place >= 0 else np.uint64(0)
        tests.append(lambda samples: (samples["tags"] & bit) > 0)
    if query.only == "failed":
        tests.append(lambda samples: samples["is_failed"])
    return tests


def _order(groups: npt.NDArray[Any], order: str) -> npt.NDArray[Any]:
    keys: dict[str, Callable[[], Any]] = {
        "newest": lambda: -groups["version"].astype(np.int64),
        "oldest": lambda: groups["version"],
        "best": lambda: -np.nan_to_num(groups["reward"]),
        "worst": lambda: np.nan_to_num(groups["reward"]),
        "spread": lambda: -np.nan_to_num(groups["spread"]),
        "longest": lambda: -groups["length"].astype(np.int64),
    }
    sorted_by: npt.NDArray[Any] = np.argsort(keys[order](), kind="stable")
    return sorted_by


def _place(words: list[str], word: str) -> int:
    return words.index(word) if word in words else -1


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)

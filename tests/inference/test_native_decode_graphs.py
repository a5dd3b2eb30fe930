"""What a captured decode step is given, as far as the host makes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rill.inference.native import decode_graphs
from rill.inference.native.batch import StepBatch, changed_places
from rill.inference.native.decode_graphs import (
    CHANGES_COLUMN,
    IDS_COLUMN,
    LENS_COLUMN,
    PLACE_COLUMN,
    DecodeGraphs,
    StepInputs,
    StepRing,
    Upload,
    graph_sizes,
    pack,
)
from rill.inference.native.sampler import SamplingBatch
from rill.models.decode.attention_paged import PagedBatch
from rill.models.decode.decode_work import WORDS, spread, work_list


def test_columns_are_padded_to_the_graphs_size_and_nothing_else_is_touched() -> None:
    view = np.full(3 * 8, -9, dtype=np.int32)
    pack(view, [np.array([1, 2, 3]), 7, np.array([4, 5, 6], dtype=np.int32)], (0, 1, 2), 3, 5, 8)
    assert view.reshape(3, 8).tolist() == [
        [1, 2, 3, 0, 0, -9, -9, -9],
        [7, 7, 7, 1, 1, -9, -9, -9],
        [4, 5, 6, 2, 2, -9, -9, -9],
    ]


def test_changed_places_of_the_block_tables_are_all_of_them_in_order() -> None:
    updates = [(3, 0, 4), (1, 7, 8), (0, 2, 2), (2, 5, 7)]
    rows, columns = changed_places(updates)
    expected = [(row, column) for row, begin, end in updates for column in range(begin, end)]
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == expected
    assert rows.dtype == columns.dtype == np.int32


def test_every_batch_has_a_graph_that_is_not_much_larger() -> None:
    for most in (1, 5, 64, 256, 1000):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for count in range(1, most + 1):
            size = next(s for s in sizes if s >= count)
            assert size - count < max(count, 64)


def test_an_upload_takes_a_buffer_that_is_large_enough_and_the_next_one_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: plain(*size, **options))
    upload = Upload(400, 96, torch.device("cpu"), 3)
    for _ in range(5):
        few, many = np.arange(3, dtype=np.int32), np.arange(200, dtype=np.int32)
        assert [t.tolist() for t in upload([few, few + 7])] == [few.tolist(), (few + 7).tolist()]
        assert [t.tolist() for t in upload([few, many])] == [few.tolist(), many.tolist()]
    into = torch.zeros(8, dtype=torch.int32)
    views = [upload.stage(size) for size in (96, 96, 97, 96)]
    views[-1][:4] = [4, 3, 2, 1]
    upload.send(4, into)
    assert into.tolist() == [4, 3, 2, 1, 0, 0, 0, 0]
    assert [len(view) for view in views] == [96, 96, 400, 96] and len({id(view) for view in views}) == 4


class Step(NamedTuple):
    """What a captured step found in its inputs."""

    ids: list[int]
    lens: list[int]
    places: list[int]
    changes: list[int]
    pieces: int


def test_every_step_finds_its_own_inputs_also_where_a_graph_is_captured_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is late: what was sent for a step is taken when that step runs."""
    pending: list[Callable[[], None]] = []
    found: list[Step] = []

    def run(ring: StepRing, inputs: StepInputs, paged: PagedBatch, has_adapters: bool) -> torch.Tensor:
        def take() -> None:
            inputs.words.copy_(ring.words[int(ring.turn)][: len(inputs.words)])
            ring.turn.copy_((ring.turn + 1) % len(ring.words))
            ids, lens, places, changes = (
                inputs.column(i).tolist() for i in (IDS_COLUMN, LENS_COLUMN, PLACE_COLUMN, CHANGES_COLUMN)
            )
            assert paged.decode_work is not None
            pieces = int((paged.decode_work.entries.view(-1, WORDS)[:, 5] > 0).sum())
            found.append(Step(ids, lens, places, changes, pieces))

        pending.append(take)
        return torch.empty(0)

    def capture(run: Callable[[], torch.Tensor], stream: Any, pool: Any) -> tuple[Any, torch.Tensor]:
        return SimpleNamespace(replay=run), run()

    plain = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **more: plain(*size, **more))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(decode_graphs, "capture", capture)
    stream: Any = SimpleNamespace(wait_stream=lambda _: None)
    tables = torch.zeros(21, 300, dtype=torch.int32)
    graphs = DecodeGraphs(
        20, tables, None, run, stream, num_staging=7, num_entries=16, is_invariant=False,  # type: ignore[arg-type]
        shares_prefixes=False, num_new=1,
    )  # fmt: skip
    graphs.capture_all(20)
    rng = np.random.default_rng(0)
    wanted: list[Step | None] = [None] * len(pending)
    for place in range(1, 60):
        lens = rng.integers(1, 4000 if place % 5 == 0 else 200, size=rng.integers(1, 21)).astype(np.int32)
        changes = rng.integers(0, 6000, size=rng.integers(len(lens) + 1)).astype(np.int32)
        before = len(pending)
        graphs.replay(decode_batch(lens), None, place, (changes, changes))
        wanted += [None] * (len(pending) - before - 1)  # captured: a step of nobody
        piece = spread(lens, 16)
        pieces = len(work_list(lens, lens, piece))
        wanted.append(Step([*lens + 7], [*lens], [place] * len(lens), [*changes], pieces))
        while len(pending) - len(found) > int(rng.integers(1, 4)):
            pending[len(found)]()
    for take in pending[len(found) :]:
        take()
    assert sum(step is None for step in wanted) > len(graph_sizes(20)), "some were captured on the way"
    for step, expected in zip(found, wanted, strict=True):
        if expected is None:
            size = len(step.ids)
            assert step == Step([0] * size, [1] * size, [0] * size, [-1] * size, 0)
            continue
        count, num_changes = len(expected.ids), len(expected.changes)
        assert step.ids[:count] == expected.ids and not any(step.ids[count:])
        assert step.lens[:count] == expected.lens and step.places[:count] == expected.places
        assert step.changes[:num_changes] == expected.changes
        assert all(change == -1 for change in step.changes[num_changes:])
        assert step.pieces == expected.pieces


def decode_batch(lens: npt.NDArray[np.int32]) -> StepBatch:
    count, slots = len(lens), np.arange(len(lens), dtype=np.int32)
    ones, none = np.ones(count, dtype=np.float32), np.zeros(count, dtype=np.int32)
    return StepBatch(
        token_ids_N=lens.astype(np.int64) + 7,
        positions_N=lens.astype(np.int64) - 1,
        kv_slots_N=lens.astype(np.int64),
        slots_B=slots,
        query_starts_B1=np.arange(count + 1, dtype=np.int32),
        context_lens_B=lens,
        tables=np.zeros((20, 300), dtype=np.int32),
        prefix_blocks=none,
        table_updates=[],
        num_running=count,
        num_decodes=count,
        sampled=[],
        sampled_rows_S=np.arange(count),
        sampled_slots_S=slots,
        sampling=SamplingBatch(ones, none, ones, ones * 0, uniform_S=np.zeros(count)),
        block_size=16,
        adapters={},
    )

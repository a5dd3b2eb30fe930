"""What a captured decode step is given, as far as the host makes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rill.inference.native.batch import changed_places
from rill.inference.native.decode_graphs import Upload, graph_sizes, pack


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

"""What a captured decode step is given, as far as the host makes it."""

from __future__ import annotations

import numpy as np

from rill.inference.native.batch import changed_places
from rill.inference.native.decode_graphs import graph_sizes, pack


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

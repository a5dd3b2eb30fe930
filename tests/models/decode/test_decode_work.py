"""The list of attention's work: every token once, cut by a row's own length alone or evenly over a batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.models.decode.decode_work import (
    GROUP_ROWS,
    MAX_PIECES,
    MIN_ROWS,
    TILE,
    WHOLE,
    shared_work,
    spread,
    work_in_runs,
    work_list,
)

LENGTHS = st.lists(st.integers(1, 40_000), min_size=1, max_size=20)


def by_row(words: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> dict[int, list[list[int]]]:
    rows: dict[int, list[list[int]]] = {}
    for word in words.tolist():
        rows.setdefault(word[0], []).append(word[1:7])
    return {row: sorted(pieces) for row, pieces in rows.items()}


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 300))
def test_the_pieces_of_a_row_cover_its_context_once(lengths: list[int], num_entries: int) -> None:
    tables = np.arange(len(lengths), dtype=np.int32) * 3
    given_lengths = np.array(lengths, dtype=np.int32)
    piece = spread(given_lengths, num_entries) if num_entries else None
    words = work_list(given_lengths, tables, piece)
    rows = by_row(words)
    assert sorted(rows) == list(range(len(lengths)))
    for row, pieces in rows.items():
        assert len(pieces) <= MAX_PIECES
        at = 0
        for index, (piece, count, table, begin, end, length) in enumerate(pieces):
            assert (piece, count, table, length) == (index, len(pieces), 3 * row, lengths[row])
            assert begin == at < end and begin % TILE == 0
            at = end
        assert at == lengths[row]
        assert len(pieces) == 1 or lengths[row] > (piece or WHOLE)
    sizes = words[:, 5] - words[:, 4]
    assert (np.diff(sizes) <= 0).all(), "the longest pieces come first"


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 7))
def test_the_cut_of_a_row_depends_on_nothing_but_its_length(lengths: list[int], max_rows: int) -> None:
    given_lengths = np.array(lengths, dtype=np.int32)
    tables = np.zeros(len(lengths), dtype=np.int32)
    words, pieces_B, runs = work_in_runs(given_lengths, tables, max_rows)
    assert [run.first_row for run in runs] == list(range(0, len(lengths), max_rows))
    assert sum(run.num_entries for run in runs) == len(words)
    for run in runs:
        rows = words[run.first_entry : run.first_entry + run.num_entries, 0]
        assert set(rows) == set(range(run.first_row, run.first_row + run.num_rows))
    for row, pieces in by_row(words).items():
        assert pieces == by_row(work_list(given_lengths[row : row + 1], tables[:1]))[0]
        assert pieces_B[row] == len(pieces)


def test_little_work_is_cut_finer_than_much() -> None:
    few, many = np.full(4, 2000, dtype=np.int32), np.full(256, 2000, dtype=np.int32)
    assert spread(few, 128) == TILE and spread(many, 128) is None
    assert spread(np.full(128, 10, dtype=np.int32), 128) is None, "each is one piece, and they are enough"
    assert len(work_list(few, few, TILE)) == 4 * MAX_PIECES
    assert len(work_list(few, few)) == 4 * 8


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3000)), min_size=1, max_size=60), st.integers(0, 300)
)
def test_rows_that_share_a_prompt_read_it_together_and_the_rest_alone(
    rows: list[tuple[int, int]], num_entries: int
) -> None:
    """Rows of group 0 share nothing; of the others 512, 784 and 40,000 tokens; each has some of its own, or none."""
    prefixes = np.array([(0, 512, 784, 40_000)[group] for group, _ in rows], dtype=np.int32)
    lengths = prefixes + np.array([max(own, group == 0) for group, own in rows], dtype=np.int32)
    keys = np.array([900 + i if group == 0 else group for i, (group, _) in enumerate(rows)], dtype=np.int32)
    tables = np.arange(len(rows), dtype=np.int32)
    shared = shared_work(lengths, tables, prefixes, keys)
    tokens = np.zeros_like(lengths) if shared is None else shared.tokens_B
    piece = spread(lengths - tokens, num_entries) if num_entries else None
    own = by_row(work_list(lengths, tables, piece, tokens))
    common: dict[int, list[list[int]]] = {}
    if shared is not None:
        pieces = by_row(shared.entries)
        for group, members in enumerate(shared.members.tolist()):
            present = [row for row in members if row >= 0]
            assert MIN_ROWS <= len(present) <= GROUP_ROWS and len({int(keys[row]) for row in present}) == 1
            common |= dict.fromkeys(present, pieces[group])
    assert set(common) == set(np.flatnonzero(tokens).tolist())
    for row, length in enumerate(lengths.tolist()):
        both = common.get(row, []) + own[row]
        assert len(both) <= MAX_PIECES and [p[0] for p in both] == list(range(len(both)))
        assert both[0][3] == 0 and both[-1][4] == length
        assert all(before[4] == after[3] for before, after in zip(both, both[1:], strict=False))
        assert {p[1] for p in own[row]} == {len(own[row])}


def test_a_row_that_has_computed_no_more_than_the_prompt_is_read_alone() -> None:
    lengths, tables = np.array([512, 513, 514, 515, 516], dtype=np.int32), np.arange(5, dtype=np.int32)
    shared = shared_work(lengths, tables, np.full(5, 512, np.int32), np.ones(5, np.int32))
    assert shared is not None and shared.tokens_B.tolist() == [0, 512, 512, 512, 512]

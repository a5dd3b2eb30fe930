from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rill.dashboard.log_index import STATE_FILE
from rill.dashboard.trace_index import NUM_BINS, UNFINISHED, TraceIndex, bins_path
from tests.dashboard.folders import BEGIN_NS, SECOND, append, process, span


def indexed(log: Path, folder: Path) -> TraceIndex:
    for _ in TraceIndex.to_write(log, folder).update():
        pass
    found = TraceIndex.open(log, folder)
    assert found is not None
    return found


def names(index: TraceIndex, rows: Any) -> list[str]:
    return sorted(index.state.pairs[pair][1] for pair in rows["pair"])


def test_any_window_gives_the_spans_that_touch_it(tmp_path: Path) -> None:
    randoms = random.Random(0)
    log = tmp_path / "a.jsonl"
    spans = sorted(
        (
            (randoms.uniform(0, 1000), randoms.expovariate(1.0), f"n{randoms.randint(0, 5)}")
            for _ in range(9000)
        ),
        key=lambda one: one[0] + one[1],
    )
    append(log, process("a"), *(span(name, "lane", start, seconds) for start, seconds, name in spans))
    index = indexed(log, tmp_path / "index")
    for _ in range(20):
        low = randoms.uniform(0, 1000)
        high = low + randoms.choice([0.01, 1.0, 100.0])
        rows = index.spans_between(BEGIN_NS + round(low * SECOND), BEGIN_NS + round(high * SECOND))
        wanted = sorted(name for start, seconds, name in spans if start <= high and start + seconds >= low)
        assert names(index, rows) == wanted


def test_own_time_is_without_what_is_nested_and_adds_up_to_the_union(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    append(
        log,
        process("a"),
        span("inner", "loop", 1.0, 2.0),
        span("inner", "loop", 4.0, 1.0),
        span("outer", "loop", 0.0, 10.0),
    )
    index = indexed(log, tmp_path / "index")
    edges = np.array([BEGIN_NS, BEGIN_NS + 5 * SECOND, BEGIN_NS + 10 * SECOND])
    by_name = {name: index.own_time(pair, edges) / SECOND for pair, (_, name) in enumerate(index.state.pairs)}
    assert by_name["inner"] == pytest.approx([3.0, 0.0], abs=1e-3)
    assert by_name["outer"] == pytest.approx([2.0, 5.0], abs=1e-3)
    assert index.state.totals_ns == [3 * SECOND, 10 * SECOND]


def test_bins_keep_their_sums_while_a_run_outgrows_them(tmp_path: Path) -> None:
    log, folder = tmp_path / "a.jsonl", tmp_path / "index"
    append(log, process("a"), span("x", "lane", 0.0, 0.5))
    first = indexed(log, folder).state.shift
    hours = 50 * 3600.0
    append(log, span("x", "lane", hours, 0.25))
    index = indexed(log, folder)
    assert index.state.shift > first
    assert (hours * SECOND) / (1 << index.state.shift) < NUM_BINS
    edges = np.array([BEGIN_NS, BEGIN_NS + round((hours + 60) * SECOND)])
    assert index.own_time(0, edges)[0] / SECOND == pytest.approx(0.75, abs=1e-3)


def test_a_log_that_grows_is_indexed_from_where_it_was(tmp_path: Path) -> None:
    log, folder = tmp_path / "a.jsonl", tmp_path / "index"
    append(log, process("a"), span("x", "lane", 0.0, 1.0))
    indexed(log, folder)
    with log.open("ab") as file:
        file.write(b'{"kind": "span", "name": "cut')  # a writer in the middle of a line
    assert indexed(log, folder).spans.num_rows == 1
    with log.open("ab") as file:
        file.write(f'", "lane": "lane", "at_ns": {BEGIN_NS + SECOND}, "duration_ns": 5}}\n'.encode())
    index = indexed(log, folder)
    assert names(index, index.spans_between(0, BEGIN_NS * 2)) == ["cut", "x"]


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    log.write_bytes(b'\x00\xff\n{"kind": 5}\n[]\n{"kind": "span", "at_ns": "soon", "name": "x"}\nnull\n\n')
    append(log, span("whole", "lane", 0.0, 1.0))
    index = indexed(log, tmp_path / "index")
    assert names(index, index.spans.read()) == ["whole"]


def test_a_line_that_is_too_long_is_passed_over_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rill.dashboard.log_reader.BLOCK_BYTES", 1000)
    monkeypatch.setattr("rill.dashboard.log_reader.MAX_LINE_BYTES", 5000)
    log = tmp_path / "a.jsonl"
    append(log, span("before", "lane", 0.0, 1.0), {"kind": "span", "name": "x" * 50_000, "at_ns": 1})
    append(log, span("after", "lane", 0.0, 1.0), span("long", "lane", 0.0, 1.0, text="y" * 3000))
    index = indexed(log, tmp_path / "index")
    assert names(index, index.spans.read()) == ["after", "before", "long"]


def test_an_index_left_half_written_is_made_again(tmp_path: Path) -> None:
    log, folder = tmp_path / "a.jsonl", tmp_path / "index"
    append(log, process("a"), span("x", "lane", 0.0, 1.0))
    indexed(log, folder)
    state = (folder / STATE_FILE).read_text()
    (folder / STATE_FILE).write_text(state.replace('"is_busy":false', '"is_busy":true'))
    with (folder / "spans.bin").open("ab") as file:
        file.write(b"half a row")
    append(log, span("y", "lane", 2.0, 1.0))
    index = indexed(log, folder)
    assert names(index, index.spans.read()) == ["x", "y"]


@pytest.mark.parametrize("spoil", ["replaced", "cut", "bad state"])
def test_an_index_that_does_not_fit_its_log_is_made_again(tmp_path: Path, spoil: str) -> None:
    log, folder = tmp_path / "a.jsonl", tmp_path / "index"
    append(log, process("a"), *(span("old", "lane", i, 0.5) for i in range(20)))
    indexed(log, folder)
    if spoil == "bad state":
        (folder / STATE_FILE).write_text("{}}")
    else:
        log.unlink()
        others = (span("new", "lane", i, 0.5) for i in range(1 if spoil == "cut" else 40))
        append(log, process("b"), *others)
    wanted = {"bad state": "old"}.get(spoil, "new")
    index = indexed(log, folder)
    assert set(names(index, index.spans.read())) == {wanted}


def test_what_has_not_ended_lasts_until_its_process_last_wrote(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    stuck = {"kind": "open", "name": "stuck", "lane": "lane", "at_ns": BEGIN_NS}
    append(log, process("a"), stuck, span("other", "else", 1.0, 2.0))
    index = indexed(log, tmp_path / "index")
    rows = index.spans_between(BEGIN_NS, BEGIN_NS + 10 * SECOND)
    (row,) = rows[rows["kind"] == UNFINISHED]
    assert row["length"] == 3 * SECOND
    append(log, span("stuck", "lane", 0.0, 5.0))
    rows = indexed(log, tmp_path / "index").spans_between(BEGIN_NS, BEGIN_NS + 10 * SECOND)
    assert not (rows["kind"] == UNFINISHED).any(), "it has ended since"


def test_a_resumed_run_ends_what_its_earlier_life_left_open(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    stuck = {"kind": "open", "name": "stuck", "lane": "lane", "at_ns": BEGIN_NS}
    append(
        log,
        process("a"),
        stuck,
        span("other", "else", 0.0, 1.0),
        process("a"),
        span("later", "else", 500.0, 1.0),
    )
    rows = indexed(log, tmp_path / "index").spans_between(BEGIN_NS, BEGIN_NS + 1000 * SECOND)
    (row,) = rows[rows["kind"] == UNFINISHED]
    assert row["length"] == SECOND


def test_room_for_the_bins_is_taken_before_they_are_mapped(tmp_path: Path) -> None:
    """A page that a full disk has no room for would end the process with a SIGBUS."""
    log, folder = tmp_path / "a.jsonl", tmp_path / "index"
    append(log, process("a"), span("x", "lane", 0.0, 1.0))
    found = bins_path(folder, indexed(log, folder).state.shift).stat()
    assert found.st_blocks * 512 >= found.st_size > 0

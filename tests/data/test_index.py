"""A source is looked through once on a machine, by all who open it: who parses what, changes, deaths and damage."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rill.data import index as index_module
from rill.data.base import DATASETS, Dataset, Split, content_key, on_side, open_indexed, prompts_of
from rill.data.generated import GeneratedStream
from rill.data.index import RowIndex
from rill.data.jsonl import JsonlDataset
from rill.data.loader import Loader, LoaderConfig, StreamLoader
from rill.data.parquet import ParquetDataset
from rill.data.rows import RowDataset, prompt_from_row
from rill.errors import DataError, StuckError

ROWS = 640


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("RILL_CACHE", str(folder))
    return folder / "rows"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(thread, row number) of every row that is parsed."""
    seen: list[tuple[str, int]] = []
    plain = RowDataset._prompt

    def counted(self: RowDataset, number: int) -> Any:
        seen.append((threading.current_thread().name, number))
        return plain(self, number)

    monkeypatch.setattr(RowDataset, "_prompt", counted)
    return seen


def question(number: int) -> dict[str, str]:
    return {"question": f"{number} + 1?", "answer": str(number + 1)}


def write_jsonl(folder: Path, count: int = ROWS) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(question(n)) + "\n" for n in range(count)))
    return path


def write_parquet(folder: Path, count: int = ROWS) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "files").mkdir()
    for k, numbers in enumerate(np.array_split(np.arange(count), 3)):
        table = pyarrow.Table.from_pylist([question(int(n)) for n in numbers])
        parquet.write_table(table, folder / "files" / f"{k}.parquet", row_group_size=50)
    return folder / "files"


def write_folder(folder: Path, count: int = ROWS) -> Path:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([question(n) for n in range(count)])
    made.save_to_disk(str(folder / "hf"), num_shards=3)
    return folder / "hf"


SOURCES = {"jsonl": write_jsonl, "parquet": write_parquet, "folder": write_folder}


def opened(kind: str, path: Path, split: Split = Split.TRAIN, **settings: Any) -> Dataset:
    config = DATASETS.load(kind).Config.model_validate({"type": kind, "path": str(path), **settings})
    return open_indexed(config, split)


def at_once(count: int, work: Callable[[int], Any]) -> list[Any]:
    """work(rank) in threads that start together; locks are between open files, so these behave like processes."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(rank: int) -> None:
        barrier.wait(timeout=30)
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


@pytest.mark.parametrize("kind", SOURCES)
def test_ranks_that_open_together_parse_every_row_once_between_them(
    kind: str, tmp_path: Path, parsed: list[tuple[str, int]]
) -> None:
    path = SOURCES[kind](tmp_path)
    assert at_once(2, lambda rank: len(opened(kind, path))) == [ROWS, ROWS]
    assert sorted(number for _, number in parsed) == list(range(ROWS))


@pytest.mark.parametrize("kind", SOURCES)
def test_a_rank_then_reads_its_own_rows_and_no_others(
    kind: str, tmp_path: Path, parsed: list[tuple[str, int]]
) -> None:
    path = SOURCES[kind](tmp_path)
    whole = opened(kind, path)
    alone = [p.id for p in Loader(whole, LoaderConfig(seed=4)).next(ROWS)]
    parsed.clear()
    read = []
    for rank in range(4):
        loader = Loader(opened(kind, path), LoaderConfig(seed=4), rank=rank, world=4)
        read.append([p.id for p in loader.next(ROWS // 4)])
        assert len(parsed) == ROWS // 4 * (rank + 1)
    assert [read[p % 4][p // 4] for p in range(ROWS)] == alone
    assert sorted(number for _, number in parsed) == list(range(ROWS))


@pytest.mark.parametrize("kind", SOURCES)
def test_both_sides_are_what_the_rows_themselves_say_and_cost_one_look(
    kind: str, tmp_path: Path, parsed: list[tuple[str, int]]
) -> None:
    path = SOURCES[kind](tmp_path)
    everything = list(prompts_of(opened(kind, path, Split.ALL)))
    parsed.clear()
    for share in (0.0, 0.1, 0.5):
        for split in (Split.TRAIN, Split.HELD_OUT):
            wanted = [p for p in everything if on_side(content_key(p), share, split)]
            if wanted:
                assert list(prompts_of(opened(kind, path, split, held_out=share))) == wanted
    assert len(parsed) == 2 * ROWS + ROWS  # what was read, for no side was looked through again


def test_other_ways_of_reading_a_row_are_checked_anew(tmp_path: Path, parsed: list[tuple[str, int]]) -> None:
    path = write_jsonl(tmp_path, 10)
    opened("jsonl", path)
    opened("jsonl", path, task="sums")
    assert len(parsed) == 10
    with pytest.raises(DataError, match="line 1: no field 'result'"):
        opened("jsonl", path, answer="result")
    opened("jsonl", path, template="Compute {question}")
    assert len(parsed) == 10 + 1 + 10
    opened("jsonl", path, limit=3)
    assert len(parsed) == 24


@pytest.mark.parametrize("kind", SOURCES)
def test_a_changed_source_is_looked_through_again(kind: str, tmp_path: Path, cache: Path) -> None:
    path = SOURCES[kind](tmp_path, 20)
    assert len(opened(kind, path)) == 20
    file = max((p for p in [path, *path.rglob("*")] if p.is_file()), key=lambda p: p.stat().st_size)
    if kind == "jsonl":  # of the same size, so that only time and content tell
        file.write_bytes(file.read_bytes().replace(b"7 + 1?", b"7 - 1?"))
        assert opened(kind, path)[7].messages[0].content == "7 - 1?"
    else:
        status = file.stat()
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert len(opened(kind, path)) == 20
    assert len(list(cache.glob("*/source.txt"))) == 1  # the folder of the former state is gone
    (tmp_path / "two").mkdir()
    opened("jsonl", write_jsonl(tmp_path / "two", 1))
    assert len(list(cache.glob("*/source.txt"))) == 2
    (tmp_path / "two" / "rows.jsonl").unlink()
    (tmp_path / "three").mkdir()
    opened("jsonl", write_jsonl(tmp_path / "three", 1))
    assert len(list(cache.glob("*/source.txt"))) == 2  # and that of a source which is gone


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_one_who_is_killed_while_opening_leaves_it_to_the_next(kind: str, tmp_path: Path) -> None:
    path = SOURCES[kind](tmp_path)
    child = os.fork()
    if child == 0:
        plain = RowDataset.__dict__["_prompt"]

        def deadly(self: RowDataset, number: int) -> Any:
            if number == ROWS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, number)

        RowDataset._prompt = deadly  # type: ignore[method-assign]
        opened(kind, path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(opened(kind, path)) == ROWS
    assert [p.answer for p in prompts_of(opened(kind, path))] == [str(n + 1) for n in range(ROWS)]


def test_one_who_is_killed_while_making_a_file_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path, 3)
    index = RowIndex(source, [source])

    def half(draft: Path) -> None:
        draft.write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        index.once("thing.bin", half)
        os._exit(0)
    os.waitpid(child, 0)
    assert not (index.folder / "thing.bin").exists() and len(list(index.folder.glob(".thing-*"))) == 1
    assert index.once("thing.bin", lambda draft: draft.write_bytes(b"whole")).read_bytes() == b"whole"
    assert not list(index.folder.glob(".thing-*"))


def test_a_damaged_index_is_made_again(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path, 50)
    opened("jsonl", path)
    for file in cache.glob("*/*.npy"):
        for size in (0, 40, file.stat().st_size - 8):
            file.write_bytes(file.read_bytes()[:size])
            assert [p.answer for p in prompts_of(opened("jsonl", path))] == [str(n + 1) for n in range(50)]


def test_an_index_that_cannot_be_opened_now_is_no_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path, 3)
    opened("jsonl", path)

    def too_many(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(np, "load", too_many)
    with pytest.raises(OSError, match="Too many open files"):
        opened("jsonl", path)


def test_a_bad_row_is_named_by_all_who_open(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, 300)
    lines = path.read_text().splitlines()
    lines[250] = '{"answer": "1"}'
    path.write_text("\n".join(lines))
    for error in at_once(3, lambda rank: opened("jsonl", path)):
        assert isinstance(error, DataError) and "rows.jsonl, line 251: no question" in str(error)


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("mark", ["", "\ufeff", "\ufeff\n"], ids=["plain", "bom", "bom_alone"])
def test_line_numbers_are_those_of_an_editor(tmp_path: Path, mark: str, end: str) -> None:
    good = json.dumps({"question": "ein Wörtchen\u2028und zwei?", "answer": "2"}, ensure_ascii=False)
    lines = ["", good, "  \t", "", good, '{"answer": "1"}']
    path = tmp_path / "rows.jsonl"
    text = mark.rstrip("\n") + (end if mark.endswith("\n") else "") + end.join(lines)
    path.write_bytes(text.encode())
    number = 6 + mark.endswith("\n")
    with pytest.raises(DataError, match=f"line {number}: no question"):
        opened("jsonl", path)
    path.write_bytes(text.replace('"answer": "1"', '"question": "x"').encode())
    dataset = opened("jsonl", path)
    assert [p.id for p in prompts_of(dataset)] == ["rows/0", "rows/1", "rows/2"]
    assert dataset[0].messages[0].content == "ein Wörtchen\u2028und zwei?"


def test_a_line_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(question(1)).encode() + b'\n{"question": "W\xf6rtchen?"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8 at byte 16"):
        opened("jsonl", path)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for n in range(3_000):
            file.write(json.dumps({"question": f"{n}" + "?" * 2_000, "answer": "1"}) + "\n")
    tracemalloc.start()
    dataset = opened("jsonl", path, held_out=0.1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < path.stat().st_size / 6
    assert isinstance(dataset, JsonlDataset) and isinstance(dataset._lines, np.memmap)


def test_a_parquet_file_is_not_held_in_memory(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"question": f"{n}" + "?" * 2_000, "answer": "1"} for n in range(4_000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    before = pyarrow.total_allocated_bytes()
    dataset = opened("parquet", tmp_path / "rows.parquet")
    assert pyarrow.total_allocated_bytes() - before < 100_000  # 8 MB, unpacked
    assert dataset[3_999].messages[0].content.startswith("3999?")


def test_without_a_cache_that_can_be_written_everybody_looks_for_himself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RILL_CACHE", str(tmp_path / "file"))
    assert len(opened("jsonl", write_jsonl(tmp_path, 5))) == 5
    assert "set RILL_CACHE" in caplog.text


def test_a_process_that_stands_still_is_not_awaited_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path, 5)
    monkeypatch.setattr(index_module, "WAIT_S", 0.05)
    began, go_on = threading.Event(), threading.Event()

    def stands(number: int) -> int:
        began.set()
        go_on.wait(timeout=30)
        return number

    index = RowIndex(path, [path])
    holder = threading.Thread(target=lambda: index.of_every_row("x", 5, stands))
    holder.start()
    try:
        assert began.wait(timeout=30)
        with pytest.raises(StuckError, match="another process that makes x.npy"):
            index.of_every_row("x", 5, lambda number: number)
    finally:
        go_on.set()
        holder.join(timeout=30)
    assert index.of_every_row("x", 5, lambda number: 0).tolist() == [0, 1, 2, 3, 4]


def test_a_source_is_the_same_by_whichever_of_its_names(
    tmp_path: Path, parsed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path, 10)
    (tmp_path / "link.jsonl").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name in (path, Path(path.name), tmp_path / "link.jsonl", path):
        assert len(opened("jsonl", name)) == 10
    assert len(parsed) == 10


def test_two_parts_of_one_folder_leave_each_others_index_alone(
    tmp_path: Path, parsed: list[tuple[str, int]]
) -> None:
    """As two splits of a data set of the hub."""
    folder = write_parquet(tmp_path, 60)
    config = ParquetDataset.Config(path=str(folder))

    def part(name: str) -> ParquetDataset:
        return ParquetDataset(config, files=[folder / name])

    first, second = part("0.parquet"), part("1.parquet")
    assert (first[0].answer, second[0].answer) == ("1", "21") and len(parsed) == 20 + 20 + 2
    assert (part("0.parquet")[1].answer, part("1.parquet")[1].answer) == ("2", "22") and len(parsed) == 44


def test_rows_that_are_read_already_are_read_on_when_their_file_is_another(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, 60)
    dataset = opened("parquet", path)
    file = path / "0.parquet"
    file.write_bytes((path / "1.parquet").read_bytes())
    assert opened("parquet", path)[0].answer == "21", "who opens it now reads what is there now"
    assert dataset[1].answer == "2"


def test_a_source_that_changes_while_it_is_opened_says_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, 5)
    index = RowIndex(path, [path])
    path.write_text(path.read_text() * 2)
    RowIndex(path, [path])
    for use in (
        lambda: index.of_every_row("x", 5, lambda number: number),
        lambda: index.once("y", lambda draft: draft.touch()),
    ):
        with pytest.raises(DataError, match="was changed while it was being opened"):
            use()


def make_stream() -> Iterator[dict[str, str]]:
    yield from (question(n) for n in range(60))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_rank_of_a_stream_looks_at_its_own_rows_only(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []

    def counted(row: Any, *args: Any, **kwargs: Any) -> Any:
        looked_at.append(row["answer"])
        return prompt_from_row(row, *args, **kwargs)

    monkeypatch.setattr("rill.data.generated.prompt_from_row", counted)
    config = GeneratedStream.Config(function=f"{__name__}:make_stream", held_out=share)
    plain = list(GeneratedStream(config))
    looked_at.clear()
    in_order = LoaderConfig(shuffle=False)
    for rank in range(3):
        own = plain[rank::3]
        loader = StreamLoader(GeneratedStream(config), in_order, rank=rank, world=3)
        assert loader.next(len(own)) == own
    assert len(looked_at) == 60 if share == 0.0 else len(looked_at) > 60

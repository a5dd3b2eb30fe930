from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import numpy as np
import pytest

from rill.telemetry import jsonl
from rill.telemetry.jsonl import LineFile, encode_line, encode_number, read_lines


def test_a_cut_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a":')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]


def test_a_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a":1}\n\x00\xff garbage\n{"a":3}\n')
    assert list(read_lines(path)) == [{"a": 1}, {"a": 3}]


def test_a_missing_file_is_an_empty_log(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl")) == []


def test_appending_after_a_kill_does_not_swallow_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":')
    file = LineFile(path)
    file.write(encode_line({"a": 3}))
    file.close()
    assert list(read_lines(path)) == [{"a": 1}, {"a": 3}]


def test_library_scalars_and_unknown_objects_are_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    file = LineFile(path)
    file.write(encode_line({"numpy": np.float32(0.5), "array": np.arange(3), "path": tmp_path}))
    file.close()
    (record,) = read_lines(path)
    assert record == {"numpy": 0.5, "array": "[0 1 2]", "path": str(tmp_path)}


def test_numbers_json_has_no_word_for_read_back() -> None:
    assert math.isnan(float(encode_number(math.nan)))
    assert float(encode_number(math.inf)) == math.inf
    assert float(encode_number(-math.inf)) == -math.inf
    assert encode_number(0.25) == 0.25


def test_a_full_disk_is_waited_for_and_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = os.write, [4, 0, 3]

    def until_full(fd: int, data: memoryview) -> int:
        if not room:
            return write(fd, data)
        if left := room.pop(0):
            return write(fd, data[:left])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", until_full)
    monkeypatch.setattr(jsonl, "RETRY_S", 0.0)
    path = tmp_path / "log.jsonl"
    file = LineFile(path)
    file.write(encode_line({"a": 1}))
    file.write(encode_line({"a": 2}))
    file.close()
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'
    impatient = LineFile(path, 0.0)
    room += [4, 0]
    with pytest.raises(OSError, match="No space left"):
        impatient.write(encode_line({"a": 3}))
    impatient.close()
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'

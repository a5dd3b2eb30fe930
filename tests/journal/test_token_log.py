"""The token log: what was written is read back, whatever cut it off."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rill.errors import JournalError
from rill.journal import reader as token_log_reader
from rill.journal import records, token_log
from rill.journal.compaction import Compaction
from rill.journal.reader import LogReader, segments
from rill.journal.records import Finished, Said
from rill.journal.token_log import FOLDER, JournalConfig, TokenLog
from rill.types import StopReason

NOW = JournalConfig(delay_s=0.005, sync_s=0.01)
EMPTY = np.zeros(0, np.int32)


def columns(start: int, count: int, version: int = 1) -> tuple[Any, Any, Any]:
    tokens = np.arange(start, start + count, dtype=np.int32)
    return tokens, -tokens.astype(np.float32) / 7, np.full(count, version, np.int32)


def end(
    log: TokenLog, number: int, num_tokens: int, reason: StopReason = StopReason.EOS, rest: Any = None
) -> None:
    tokens, logprobs, versions = rest or (EMPTY, EMPTY.astype(np.float32), EMPTY)
    errors: list[JournalError | None] = []
    log.finish(Finished(number, num_tokens, reason, None, tokens, logprobs, versions), None, errors.append)
    log.flush()
    deadline_s = time.monotonic() + 10
    while not errors and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert errors == [None]


def reader_of(folder: Path) -> LogReader:
    reader = LogReader(folder)
    reader.read_all()
    return reader


def test_sequences_come_back_with_every_token_version_and_end(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "rollout-0", NOW)
    one, two = (log.open(name, num_prompt=5, base=0) for name in ("g00000001/0#a", "g00000001/1#a"))
    mixed = (np.arange(6, dtype=np.int32), np.zeros(6, np.float32), np.array([1, 1, 2, 2, 2, 3], np.int32))
    log.tokens(one, *mixed)
    log.tokens(two, *columns(50, 3))
    log.tokens(one, *columns(6, 2, version=3))
    end(log, one, 11, rest=columns(8, 3, version=4))
    found = reader_of(tmp_path).sequence("g00000001/0#a")
    assert found is not None and found.is_finished and found.reason is StopReason.EOS
    assert found.token_ids.tolist() == list(range(11))
    assert found.versions.tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    np.testing.assert_array_equal(found.logprobs[6:8], columns(6, 2)[1])
    running = reader_of(tmp_path).sequence("g00000001/1#a")
    assert running is not None and not running.is_finished and running.token_ids.tolist() == [50, 51, 52]
    log.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_commit_of_any_lengths_and_versions_is_read_as_it_was_written(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    written: dict[int, list[tuple[int, float, int]]] = {}
    said = []
    for number in rng.integers(0, 5, 12).tolist():
        count = int(rng.choice([0, 1, 3, 70_000 if seed == 0 else 9]))
        ids, versions = rng.integers(0, 1 << 17, count), np.sort(rng.integers(1, 4, count))
        logprobs = -rng.random(count).astype(np.float32)
        said.append(Said(number, ids.astype(np.int32), logprobs, versions.astype(np.int32)))
        written.setdefault(number, []).extend(zip(ids.tolist(), logprobs.tolist(), versions.tolist()))
    path = tmp_path / "one.log"
    path.write_bytes(records.MAGIC + b"".join(records.encode_tokens(said)))
    read: dict[int, list[tuple[int, float, int]]] = {number: [] for number in written}
    for entries in records.Segment(path).read():
        assert isinstance(entries, list)
        for entry in entries:
            columns = entry.token_ids.tolist(), entry.logprobs.tolist()
            read[entry.number] += [(token, logprob, entry.version) for token, logprob in zip(*columns)]
    assert read == written


def test_experts_and_stop_strings_come_back_as_they_were(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "rollout-0", NOW)
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    said = Finished(number, 3, StopReason.STOP, "\n\n", *columns(0, 3))
    log.finish(said, experts, lambda error: None)
    log.close()
    found = reader_of(tmp_path).sequence("g00000001/0#a")
    assert found is not None and (found.reason, found.stop_text) == (StopReason.STOP, "\n\n")
    assert found.experts_TLK.dtype == np.int16 and np.array_equal(found.experts_TLK, experts)


def test_a_log_cut_off_at_any_byte_gives_a_prefix_and_never_a_wrong_token(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "rollout-0", NOW)
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    for start in range(0, 40, 4):
        log.tokens(number, *columns(start, 4))
        log.flush()
    end(log, number, 44, rest=columns(40, 4))
    log.close()
    (path,) = segments(tmp_path / FOLDER)
    whole = path.stat().st_size
    lengths = []
    for size in range(whole, -1, -1):
        os.truncate(path, size)
        found = reader_of(tmp_path).sequence("g00000001/0#a")
        tokens = [] if found is None else found.token_ids.tolist()
        assert tokens == list(range(len(tokens)))
        assert (found is not None and found.is_finished) == (size == whole)
        lengths.append(len(tokens))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 44


def test_a_flipped_bit_is_found_and_costs_its_record_alone(tmp_path: Path) -> None:
    """What was under way then takes nothing from behind the gap; what began after it is whole."""
    log = TokenLog(tmp_path, "rollout-0", NOW)
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    ends = []
    for start in (0, 4, 8):
        log.tokens(number, *columns(start, 4))
        log.flush()
        ends.append(segments(tmp_path / FOLDER)[0].stat().st_size)
    end(log, number, 12)
    later = log.open("g00000002/0#a", num_prompt=5, base=0)
    log.tokens(later, *columns(20, 4))
    end(log, later, 4)
    log.event("g00000002/0", "tool/1", "paid")
    log.close()
    (path,) = segments(tmp_path / FOLDER)
    whole = path.read_bytes()
    for at in range(ends[0], ends[1]):
        for bit in (0, 7):
            content = bytearray(whole)
            content[at] ^= 1 << bit
            path.write_bytes(content)
            reader = reader_of(tmp_path)
            hurt, after = reader.sequence("g00000001/0#a"), reader.sequence("g00000002/0#a")
            assert hurt is not None and hurt.token_ids.tolist() == [0, 1, 2, 3] and not hurt.is_finished
            assert after is not None and after.is_finished and after.token_ids.tolist() == [20, 21, 22, 23]
            assert reader.events("g00000002/0") == {"tool/1": "paid"}
            (damage,) = reader.damages()
            assert "checksum" in damage and f"{ends[1] - ends[0]} bytes are lost" in damage


@pytest.mark.parametrize("harm", ["cut", "zeros", "head"])
def test_damage_to_a_file_in_the_middle_leaves_no_gap_within_an_answer(tmp_path: Path, harm: str) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60, segment_bytes=1 << 10))
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    for start in range(0, 600, 100):
        log.tokens(number, *columns(start, 100))
        log.flush()
    later = log.open("g00000002/0#a", num_prompt=5, base=0)
    log.tokens(later, *columns(0, 3))
    log.close()
    second = segments(tmp_path / FOLDER)[1]
    content = second.read_bytes()
    match harm:
        case "cut":
            os.truncate(second, len(content) - 10)
        case "zeros":
            second.write_bytes(content[:-500] + bytes(500))
        case "head":
            second.write_bytes(b"?" + content[1:])
    reader = reader_of(tmp_path)
    hurt, after = reader.sequence("g00000001/0#a"), reader.sequence("g00000002/0#a")
    assert hurt is not None and hurt.token_ids.tolist() == list(range(len(hurt.token_ids)))
    assert 0 < len(hurt.token_ids) < 600
    assert after is not None and after.token_ids.tolist() == [0, 1, 2]
    assert len(reader.damages()) == 1 and second.name in reader.damages()[0]


def test_an_answer_of_which_a_file_is_missing_is_left_out(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60, segment_bytes=1 << 10))
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    for start in range(0, 600, 100):
        log.tokens(number, *columns(start, 100))
        log.flush()
    end(log, number, 600)
    log.close()
    segments(tmp_path / FOLDER)[1].unlink()
    found = reader_of(tmp_path).sequence("g00000001/0#a")
    assert found is not None and not found.is_finished and found.token_ids.tolist() == []


def test_what_a_power_failure_leaves_at_the_end_is_told_and_a_killed_writers_half_record_is_not(
    tmp_path: Path,
) -> None:
    log = TokenLog(tmp_path, "rollout-0", NOW)
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    log.tokens(number, *columns(0, 4))
    log.flush()
    log.close()
    (path,) = segments(tmp_path / FOLDER)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert reader_of(tmp_path).damages() == []
    path.write_bytes(content + bytes(100))
    (damage,) = reader_of(tmp_path).damages()
    assert "100 bytes are lost" in damage


def test_attempts_are_joined_by_where_they_went_on_and_not_by_which_became_longest(tmp_path: Path) -> None:
    logs = [TokenLog(tmp_path, f"rollout-{n}", NOW) for n in range(3)]
    first = logs[0].open("g00000001/0#a", num_prompt=5, base=0)
    logs[0].tokens(first, *columns(0, 10))
    logs[0].flush()
    second = logs[1].open("g00000001/0#a", num_prompt=5, base=6)
    logs[1].tokens(second, *columns(100, 2))
    logs[1].flush()
    logs[0].tokens(first, *columns(10, 30))  # nobody waits for this one any more
    logs[0].flush()
    gap = logs[2].open("g00000001/0#a", num_prompt=5, base=99)  # behind tokens that nobody has
    logs[2].tokens(gap, *columns(500, 1))
    logs[2].flush()
    found = reader_of(tmp_path).sequence("g00000001/0#a")
    assert found is not None and found.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 100, 101]
    for log in logs:
        log.close()


def test_sixteen_bytes_a_token_are_enough(tmp_path: Path) -> None:
    """Also where every commit has a single token of each sequence, as on a slow engine."""
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60))
    names = [f"g{n // 8:08d}/{n % 8}#policy/5f0c1f2e3d4c5b6a" for n in range(64)]
    numbers = [log.open(name, num_prompt=100, base=0) for name in names]
    for step in range(256):
        for number in numbers:
            log.tokens(number, *columns(step, 1))
        log.flush()
    log.close()
    num_bytes = sum(path.stat().st_size for path in segments(tmp_path / FOLDER))
    assert num_bytes / (64 * 256) <= 16


def test_a_reader_follows_a_log_that_grows_and_tells_the_dead_from_the_living(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TokenLog(tmp_path, "rollout-0", NOW)
    reader = LogReader(tmp_path)
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    log.tokens(number, *columns(0, 2))
    log.flush()
    assert not reader.has_left("g00000001"), "its process lives and has it in hand"
    reader.read_all()
    log.tokens(number, *columns(2, 2))
    log.close()
    assert reader.has_left("g00000001") and not reader.has_left("g00000002")
    looks: list[Path] = []
    monkeypatch.setattr(
        "rill.journal.reader.segments", lambda folder: looks.append(folder) or segments(folder)
    )
    assert reader.left_of({"g00000001", "g00000002", "g00000003"}) == {"g00000001"}
    assert len(looks) == 1, "the folder may be on another machine"
    found = reader.sequence("g00000001/0#a")
    assert found is not None and found.token_ids.tolist() == [0, 1, 2, 3]


def test_a_living_process_that_goes_on_to_its_next_file_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is taken for dead is read once and never again."""
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60, segment_bytes=1 << 10))
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    reader, is_held = LogReader(tmp_path), token_log_reader.is_held

    def goes_on(path: Path) -> bool:
        """Between the listing and the look."""
        monkeypatch.setattr(token_log_reader, "is_held", is_held)
        log.tokens(number, *columns(0, 200))
        log.flush()
        log.tokens(number, *columns(200, 200))
        log.flush()
        return is_held(path)

    monkeypatch.setattr(token_log_reader, "is_held", goes_on)
    assert not reader.has_left("g00000001")
    log.tokens(number, *columns(400, 10))
    log.close()
    assert reader.has_left("g00000001")
    found = reader.sequence("g00000001/0#a")
    assert found is not None and found.token_ids.tolist() == list(range(410))


def test_nobody_sees_a_file_before_its_writer_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be removed, or taken for that of a dead process, while it is being written."""
    flock, seen = fcntl.flock, list[Path]()

    def look_first(fd: int, operation: int) -> None:
        seen.extend(path for path in segments(tmp_path / FOLDER) if not token_log_reader.is_held(path))
        flock(fd, operation)

    monkeypatch.setattr(token_log.fcntl, "flock", look_first)
    log = TokenLog(tmp_path, "rollout-0", NOW)
    monkeypatch.undo()
    log.close()
    assert seen == []


def test_a_file_that_cannot_be_looked_at_for_the_moment_is_not_a_dead_processs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, reader = TokenLog(tmp_path, "rollout-0", NOW), LogReader(tmp_path)
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    log.tokens(number, *columns(0, 4))
    log.flush()

    def too_many(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(token_log_reader.os, "open", too_many)
        assert not reader.has_left("g00000001")
    log.close()
    assert reader.has_left("g00000001")


KILLED = """
import sys, time, numpy as np
from pathlib import Path
from rill.journal.token_log import JournalConfig, TokenLog
log = TokenLog(Path(sys.argv[1]), "rollout-0", JournalConfig())
number = log.open("g00000001/0#a", num_prompt=5, base=0)
log.tokens(number, np.arange(9, dtype=np.int32), np.zeros(9, np.float32), np.ones(9, np.int32))
log.event("g00000001/0", "tool/1", {"result": "paid"})
print("written", flush=True)
time.sleep(60)
"""


def test_a_process_may_hand_over_what_it_wrote_and_live_on(tmp_path: Path) -> None:
    log, reader = TokenLog(tmp_path, "rollout-0", NOW), LogReader(tmp_path)
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    log.tokens(number, *columns(0, 4))
    assert not reader.has_left("g00000001")
    log.hand_over()
    assert reader.has_left("g00000001"), "whoever begins it now looks for it, this process too"
    again = log.open("g00000001/0#a", num_prompt=5, base=4)
    log.tokens(again, *columns(4, 2))
    end(log, again, 2)
    reader.read_all()
    found = reader.sequence("g00000001/0#a")
    assert found is not None and found.is_finished and found.token_ids.tolist() == list(range(6))
    log.close()


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"written\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    reader = LogReader(tmp_path)
    assert reader.has_left("g00000001")
    found = reader.sequence("g00000001/0#a")
    assert found is not None and found.token_ids.tolist() == list(range(9))
    assert reader.events("g00000001/0") == {"tool/1": {"result": "paid"}}


def test_a_full_disk_makes_the_log_wait_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60))
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    write, failures = os.write, iter([OSError(28, "No space left on device")] * 2)

    def full(fd: int, content: Any) -> int:
        for error in failures:
            write(fd, bytes(content)[:5])  # a part gets in
            raise error
        return write(fd, content)

    monkeypatch.setattr(token_log.os, "write", full)
    monkeypatch.setattr(token_log, "RETRY_S", 0.01)
    log.tokens(number, *columns(0, 6))
    log.flush()
    log.close()
    found = reader_of(tmp_path).sequence("g00000001/0#a")
    assert found is not None and found.token_ids.tolist() == list(range(6))
    assert "No space left on device" in caplog.text and "until there is room" in caplog.text


def test_a_disk_that_stays_full_is_an_error_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60))

    def full(fd: int, content: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_log, "FULL_TIMEOUT_S", 0.02)
    monkeypatch.setattr(token_log, "RETRY_S", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(token_log.os, "write", full)
        with pytest.raises(JournalError, match="No space left on device. Make room, then resume"):
            log.event("g00000001/0", "tool/1", "paid")
    log.close()


def test_an_event_that_cannot_be_written_down_costs_nobody_elses_tokens(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60))
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    log.tokens(number, *columns(0, 4))
    with pytest.raises(TypeError, match="not JSON serializable"):
        log.event("g00000002", "begun", object())
    log.tokens(number, *columns(4, 4))
    log.close()
    found = reader_of(tmp_path).sequence("g00000001/0#a")
    assert found is not None and found.token_ids.tolist() == list(range(8))


def test_after_a_write_that_failed_for_good_nothing_is_written_behind_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60))
    number = log.open("g00000001/0#a", num_prompt=5, base=0)
    log.tokens(number, *columns(0, 4))
    log.flush()

    def broken(fd: int, content: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(token_log, "FULL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(token_log, "RETRY_S", 0.0)
    log.tokens(number, *columns(4, 4))
    with monkeypatch.context() as patched:
        patched.setattr(token_log.os, "write", broken)
        patched.setattr(token_log.os, "ftruncate", broken)
        with pytest.raises(JournalError, match="Input/output error"):
            log.flush()
    log.tokens(number, *columns(8, 4))
    with pytest.raises(JournalError, match="Input/output error"):
        log.flush()
    log.close()
    found = reader_of(tmp_path).sequence("g00000001/0#a")
    assert found is not None and found.token_ids.tolist() == [0, 1, 2, 3]


def test_files_are_removed_once_all_their_groups_are_done_with(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=60, segment_bytes=1 << 10))
    long_lived = log.open("g00000000/0#a", num_prompt=5, base=0)
    for index in range(1, 8):
        number = log.open(f"g{index:08d}/0#a", num_prompt=5, base=0)
        log.tokens(number, *columns(0, 200))
        end(log, number, 200)
    log.tokens(long_lived, *columns(0, 3))
    log.flush()
    before = segments(tmp_path / FOLDER)
    compaction = Compaction(tmp_path)
    assert compaction.run(lambda group: group != "" and int(group[1:]) in (0, 5)) > 0
    left = reader_of(tmp_path)
    for index, count in ((0, 3), (5, 200)):
        found = left.sequence(f"g{index:08d}/0#a")
        assert found is not None and len(found.token_ids) == count
    assert left.sequence("g00000003/0#a") is None
    assert len(segments(tmp_path / FOLDER)) < len(before)
    log.close()


def test_the_end_of_an_answer_does_not_wait_for_a_disk_that_syncs_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_syncing, may_end, synced = threading.Event(), threading.Event(), set[int]()

    def slow(fd: int) -> None:
        is_syncing.set()
        assert may_end.wait(60)
        synced.add(os.fstat(fd).st_ino)

    monkeypatch.setattr("rill.journal.token_log.os.fdatasync", slow)
    log = TokenLog(tmp_path, "rollout-0", JournalConfig(delay_s=0, sync_s=0.01, segment_bytes=1 << 10))
    for name in ("g00000001/0#a", "g00000001/1#a"):
        number = log.open(name, num_prompt=5, base=0)
        log.tokens(number, *columns(0, 200))
        written: Future[object] = Future()
        log.finish(Finished(number, 200, StopReason.LENGTH, None, *columns(0, 0)), None, written.set_result)
        assert written.result(60) is None, "written while the disk is busy"
        assert is_syncing.wait(60)
    may_end.set()
    log.close()
    paths = segments(tmp_path / FOLDER)
    assert len(paths) > 1 and synced == {path.stat().st_ino for path in paths}, "ended files are synced too"

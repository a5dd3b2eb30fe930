from __future__ import annotations

import errno
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from rill.cli.dashboard import DEFAULT_PORT, _listen
from rill.errors import UserError
from tests.dashboard.folders import small_run

COMMAND = [sys.executable, "-c", "from rill.cli.main import main; main()", "dashboard"]


def test_the_printed_address_answers_at_once_and_nothing_is_left_behind(tmp_path: Path) -> None:
    small_run(tmp_path)
    process = subprocess.Popen([*COMMAND, "--root", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(3)]
    address = re.search(r"http://\S+", said[0])
    assert address is not None
    assert re.search(r"ssh -N -L (\d+):localhost:\1 \S+@\S+", said[1])
    runs = httpx.get(f"{address[0]}api/runs", timeout=60).json()["runs"]
    assert [run["key"] for run in runs] == ["small"]
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_run_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "absent", "--root", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "absent" in done.stderr
    done = subprocess.run(
        [*COMMAND, "--root", str(tmp_path / "no")], capture_output=True, text=True, timeout=60
    )
    assert "there is no folder" in done.stderr


def test_a_taken_port_is_passed_over_unless_it_was_asked_for() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="choose another with --port"):
            _listen("127.0.0.1", taken.getsockname()[1])
    with _listen("127.0.0.1", 0) as first, _listen("127.0.0.1", 0) as second:
        assert DEFAULT_PORT <= first.getsockname()[1] < second.getsockname()[1]


def test_an_address_of_a_kind_that_the_machine_has_not_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unsupported(*_: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", unsupported)
    with pytest.raises(UserError, match="cannot listen on ::1:.*not supported"):
        _listen("::1", 0)

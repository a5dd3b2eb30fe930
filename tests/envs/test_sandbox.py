"""Hostile programs: whatever they do, the run ends in time and nothing passes that did not."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from rill.envs import sandbox
from rill.envs.sandbox import Limits, protections, run_python

QUICK = Limits(wall_s=3.0, cpu_s=2, memory_bytes=512 * 2**20, output_bytes=100_000)


def test_checks_pass_and_fail_one_by_one() -> None:
    result = run_python(
        "def add(a, b): return a + b", checks=["assert add(1, 2) == 3", "assert add(1, 1) == 3"]
    )
    assert result.passed == (True, False) and "check 1" in result.error


LIAR = "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\n"


@pytest.mark.parametrize("answer", ["Yes()", "[1, Yes()]", "{'a': Yes()}", "(lambda: Yes())()"])
def test_an_object_that_equals_everything_equals_no_plain_value(answer: str) -> None:
    code = f"{LIAR}def f(): return {answer}"
    checks = [
        "assert f() == 3",
        "assert 3 == f()",
        "assert f() == [1, 2]",
        "def check(g):\n    assert g() == {'a': 1}\ncheck(f)",
    ]
    assert run_python(code, checks=checks).passed == (False,) * 4


def test_honest_comparisons_stay_what_they_are() -> None:
    code = (
        "from dataclasses import dataclass\nfrom fractions import Fraction\nfrom collections import Counter\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "def f(): return [1, 2.0, ('a', None), {'k': {3}}]"
    )
    checks = [
        "assert f() == [1, 2.0, ('a', None), {'k': {3}}], 'with a message'",
        "assert Point(1) == Point(1)",
        "assert Fraction(6, 2) == 3",
        "assert Counter('aab') == {'a': 2, 'b': 1}",
        "assert sum(f()[:1]) == 1 and len(f()) == 4",
    ]
    assert run_python(code, checks=checks).passed == (True,) * 5
    assert run_python(code, checks=["assert Point(1) == Point(2)", "assert f() == [1]"]).passed == (
        False,
        False,
    )


def test_standard_input_and_output() -> None:
    result = run_python("a, b = map(int, input().split())\nprint(a + b)", stdin="3 4\n")
    assert result.stdout == "7\n" and result.ended == "ok" and result.exit_code == 0


def test_installed_libraries_only_where_they_are_allowed() -> None:
    code = "import numpy\nx = int(numpy.ones(3).sum())"
    assert run_python(code, checks=["assert x == 3"], packages=True).passed == (True,)
    assert run_python(code, checks=["assert x == 3"]).passed == (False,)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)\ndef f(): return 1",
        "print('passed')\nraise SystemExit",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'secret 0\\n')\n    except OSError: pass",
        "import sys\nf = sys._getframe()\nwhile f: print(f.f_locals['secret'])",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None",
        "import sys\nsys.modules['__main__'].exec = lambda *a: None",
        "import os, json\nos.write = os.read = json.loads = lambda *a: b''",
        "import os\nos.kill(os.getpid(), 9)",
        "import sys; sys.setrecursionlimit(10**9)\ndef g(): return g()\ng()",
    ],
)
def test_a_program_that_leaves_or_lies_has_passed_nothing(code: str) -> None:
    assert run_python(code, checks=["assert f() == 1"], limits=QUICK).passed == (False,)


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nfor s in (signal.SIGTERM, signal.SIGXCPU): signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass",
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(60)",
    ],
    ids=["loop", "sleep", "ignores signals", "hides its output"],
)
def test_a_program_without_end_is_ended(code: str) -> None:
    started = time.monotonic()
    result = run_python(code, checks=["pass"], limits=Limits(wall_s=1.0, cpu_s=1))
    assert time.monotonic() - started < 8 and result.passed == (False,)


def test_endless_output_is_cut_off() -> None:
    result = run_python("while True: print('x' * 1000)", limits=QUICK)
    assert result.ended == "output" and len(result.stdout) <= 100_000


def test_memory_is_limited() -> None:
    result = run_python("x = bytearray(4 * 2**30)", checks=["assert x"], limits=QUICK)
    assert result.passed == (False,) and "MemoryError" in result.error


def test_a_fork_bomb_ends_and_leaves_nothing_behind() -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    before = len(os.listdir("/proc"))
    if "calls" not in protections():
        pytest.skip("no system-call filters here: nothing limits forks")
    result = run_python(bomb, limits=Limits(wall_s=1.0, cpu_s=1))
    assert result.ended != "ok"
    time.sleep(0.3)
    assert len(os.listdir("/proc")) < before + 50


def test_a_detached_child_does_not_outlive_the_run(tmp_path: Path) -> None:
    if "processes" not in protections():
        pytest.skip("no process namespaces here: a child in a session of its own can escape")
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)"
    result = run_python(code + "\ntime.sleep(0.1)", limits=Limits(wall_s=3.0, num_processes=4))
    assert result.ended in ("ok", "timeout")
    time.sleep(0.2)
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"sandbox_launcher" not in status.read_bytes()
        except OSError:
            continue


def test_nothing_can_be_written_outside_the_folder(tmp_path: Path) -> None:
    if not protections() & {"files", "user"}:
        pytest.skip("neither Landlock nor a user of its own here")
    tmp_path.chmod(0o700)
    code = f"open({str(tmp_path / 'mark')!r}, 'w').write('x')"
    result = run_python(code, limits=QUICK)
    assert result.ended == "error" and "PermissionError" in result.error
    assert not (tmp_path / "mark").exists()
    inside = run_python("open('mark', 'w').write('x')\nprint(open('mark').read())", limits=QUICK)
    assert inside.stdout == "x\n", inside


def test_new_processes_are_refused_and_threads_are_not() -> None:
    if "calls" not in protections():
        pytest.skip("no system-call filters here")
    result = run_python(
        "import os\ntry: os.fork()\nexcept OSError as e: print(type(e).__name__)", limits=QUICK
    )
    assert result.stdout == "PermissionError\n"
    thread = "import threading\nt = threading.Thread(target=print, args=('hi',))\nt.start(); t.join()"
    assert run_python(thread, limits=QUICK).stdout == "hi\n"


def test_huge_files_are_refused() -> None:
    code = "f = open('big', 'wb')\nfor _ in range(200): f.write(b'x' * 2**20)"
    result = run_python(code, checks=["assert True"], limits=Limits(wall_s=5, file_bytes=2**20))
    assert result.ended != "ok" or "File too large" in result.error


@pytest.mark.parametrize(
    "code",
    [
        "import itertools\nfor i in itertools.count(): open(f'f{i}', 'wb').write(b'0' * 2**20)",
        "import itertools\nfor i in itertools.count(): open(f'f{i}', 'wb')",
        "import itertools, os\nfor i in itertools.count(): os.mkdir(f'f{i}')",
    ],
    ids=["bytes", "files", "folders"],
)
def test_the_disk_cannot_be_filled(code: str) -> None:
    result = run_python(
        code, checks=["pass"], limits=Limits(wall_s=10.0, folder_bytes=2**24, folder_files=500)
    )
    assert result.ended == "disk" and result.passed == (False,)
    assert not [
        path for path in Path(tempfile.gettempdir()).glob("rill-sandbox-*") if path.stat().st_size > 10**6
    ]


def test_only_its_folder_and_pythons_own_files_can_be_read(tmp_path: Path) -> None:
    if "reads" not in protections():
        pytest.skip("no Landlock here: what everybody may read stays readable")
    (tmp_path / "answers.jsonl").write_text("42")
    for path in (tmp_path / "answers.jsonl", Path("/etc/passwd"), Path("/proc/self/environ"), Path(__file__)):
        assert "PermissionError" in run_python(f"open({str(path)!r}).read()", limits=QUICK).error, path
    libraries = "import sqlite3, decimal, zoneinfo, random\nrandom.SystemRandom().random()\nprint('fine')"
    assert run_python(libraries, limits=QUICK).stdout == "fine\n"


def test_there_is_no_network() -> None:
    if "network" not in protections():
        pytest.skip("neither network namespaces nor system-call filters here")
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        code = f"import socket\ns = socket.socket(socket.{family})\ns.connect(('127.0.0.1', 9))"
        assert run_python(code, limits=QUICK).ended == "error", family
    # What an event loop needs in itself is no network.
    assert (
        run_python("import asyncio\nasyncio.run(asyncio.sleep(0))\nprint('fine')", limits=QUICK).stdout
        == "fine\n"
    )


def test_it_has_no_hold_on_other_processes() -> None:
    if "calls" not in protections():
        pytest.skip("no system-call filters here")
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.ptrace(16, {os.getpid()}, 0, 0))\n"
        "try: os.kill(-1, 9)\nexcept OSError as error: print(type(error).__name__)"
    )
    # In a process tree of its own there is nobody else to kill; elsewhere the call is refused.
    said = run_python(code, limits=QUICK).stdout.split()
    assert said in (["-1", "PermissionError"], ["-1", "ProcessLookupError"])


def test_the_environment_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame")
    assert "sesame" not in run_python("import os; print(dict(os.environ))").stdout


def test_what_a_killed_process_left_behind_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, age_s in (("rill-sandbox-old", 7200.0), ("rill-sandbox-new", 0.0), ("other", 7200.0)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    sandbox._sweep.__wrapped__()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "rill-sandbox-new"]

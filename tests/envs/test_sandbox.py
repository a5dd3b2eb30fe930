"""Hostile programs: whatever they do, a session ends in time, and nothing gets out of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rill.envs.rewards.code import CodeReward
from rill.envs.sandbox import Limits, Sandbox, SandboxError, SandboxPool, bubblewrap, missing, open_sandbox
from rill.errors import UnsupportedError

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no sandbox here: {missing()}")

QUICK = Limits(
    exec_s=20.0, memory_bytes=512 * 2**20, output_bytes=100_000, disk_bytes=4 * 2**20, file_bytes=2**20
)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    session = await open_sandbox(limits=QUICK)
    yield session
    await session.close()


async def test_commands_programs_and_files_share_a_session(sandbox: Sandbox) -> None:
    await sandbox.write("src/data.txt", b"3 4\n")
    program = "print(sum(map(int, open('src/data.txt').read().split())) + int(input()))"
    done = await sandbox.python(program, stdin=b"5")
    assert (done.exit_code, done.stdout, done.ended) == (0, b"12\n", "ok")
    listed = await sandbox.exec(["sh", "-c", "echo out > made; cat src/data.txt; echo oops >&2; exit 3"])
    assert (listed.exit_code, listed.stdout, listed.stderr, listed.ended) == (3, b"3 4\n", b"oops\n", "error")
    assert await sandbox.read("made") == b"out\n"
    with pytest.raises(OSError, match="FileNotFoundError"):
        await sandbox.read("nothing")


async def test_a_command_that_is_not_there_or_leaves_children_behind_is_no_trouble(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    left = await sandbox.exec(["sh", "-c", "sleep 300 & echo done"])
    assert (left.stdout, left.ended) == (b"done\n", "ok")
    assert (await sandbox.python("raise SystemExit(4)")).exit_code == 4
    assert b"ZeroDivisionError" in (await sandbox.python("1/0")).stderr


async def test_installed_libraries_only_where_they_are_allowed(sandbox: Sandbox) -> None:
    code = "import numpy\nprint(int(numpy.ones(3).sum()))"
    assert b"ModuleNotFoundError" in (await sandbox.python(code)).stderr
    wide = await open_sandbox(limits=Limits(memory_bytes=2**32, exec_s=60.0, num_processes=64), packages=True)
    assert (await wide.python(code)).stdout == b"3\n"
    await wide.close()


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nfor s in (signal.SIGTERM, signal.SIGINT): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(60)",
        "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(60)",
    ],
    ids=["loop", "sleep", "ignores signals", "hides its output", "detaches"],
)
async def test_a_program_without_end_is_ended_and_the_session_goes_on(sandbox: Sandbox, code: str) -> None:
    done = await sandbox.python(code, timeout_s=0.3)
    assert done.ended in ("timeout", "ok")
    assert (await sandbox.python("print(1)")).stdout == b"1\n"


async def test_endless_output_is_cut_off(sandbox: Sandbox) -> None:
    done = await sandbox.python("while True: print('x' * 1000)")
    assert done.ended == "output" and len(done.stdout) <= 100_000


async def test_memory_disk_files_and_processes_are_limited(sandbox: Sandbox) -> None:
    assert b"MemoryError" in (await sandbox.python("x = bytearray(2 * 2**30)")).stderr
    big = "f = open('big', 'wb')\nfor _ in range(200): f.write(b'x' * 2**20)"
    assert (await sandbox.python(big)).ended == "error"
    many = "import itertools\nfor i in itertools.count(): open(f'/tmp/f{i}', 'wb').write(b'0' * 2**19)"
    assert b"No space left" in (await sandbox.python(many)).stderr
    opened = "f = [open('/dev/null') for _ in range(100)]"
    assert b"Too many open files" in (await sandbox.python(opened)).stderr
    forks = "import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(9)"
    assert b"Resource temporarily unavailable" in (await sandbox.python(forks)).stderr


async def test_a_fork_bomb_ends_with_its_session() -> None:
    before = len([name for name in os.listdir("/proc") if name.isdigit()])
    session = await open_sandbox(limits=Limits(num_processes=32))
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    with contextlib.suppress(SandboxError):  # where it left its guest no time to answer
        assert (await session.python(bomb, timeout_s=0.5)).ended != "ok"
    await session.close()
    for _ in range(100):
        if len([name for name in os.listdir("/proc") if name.isdigit()]) < before + 20:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("processes were left behind")


async def test_nothing_of_this_machine_can_be_read_or_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("42")
    for path in (tmp_path / "answers.jsonl", Path("/etc/passwd"), Path(__file__), Path("/etc/shadow")):
        code = f"print(open({str(path)!r}).read())"
        assert (await sandbox.python(code)).ended == "error", path
    for path in (tmp_path / "mark", Path("/usr/mark"), Path("/guest.py"), Path("/mark")):
        assert (await sandbox.python(f"open({str(path)!r}, 'w').write('x')")).ended == "error", path
    assert not (tmp_path / "mark").exists()


async def test_there_is_no_network_and_no_other_process(sandbox: Sandbox) -> None:
    for target in ("('8.8.8.8', 53)", "('127.0.0.1', 22)"):
        code = f"import socket\ns = socket.socket()\ns.settimeout(2)\ns.connect({target})"
        assert (await sandbox.python(code)).ended == "error"
    seen = (await sandbox.python("import os\nprint(sum(n.isdigit() for n in os.listdir('/proc')))")).stdout
    assert int(seen) < 8, "only what runs in the session"
    kill = f"import os\nos.kill({os.getpid()}, 0)"
    assert b"ProcessLookupError" in (await sandbox.python(kill)).stderr


async def test_the_environment_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sesame")
    session = await open_sandbox()
    assert b"sesame" not in (await session.exec(["env"])).stdout
    assert b"sesame" not in (await session.exec(["sh", "-c", "cat /proc/*/environ"])).stdout
    await session.close()


async def test_a_guest_that_was_taken_over_is_not_believed() -> None:
    """Programs run as the guest's own user: what they make it say is data, and nonsense ends the session."""
    session = await open_sandbox(limits=QUICK)
    takeover = "import os\nos.kill(os.getppid(), 9)"
    with pytest.raises(SandboxError, match="ended"):
        await session.python(takeover)
    with pytest.raises(SandboxError, match="closed"):
        await session.python("print(1)")
    await session.close()


async def test_a_cancelled_call_takes_its_session_with_it(sandbox: Sandbox) -> None:
    call = asyncio.ensure_future(sandbox.python("import time; time.sleep(60)", timeout_s=60.0))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.exec(["true"])


async def test_a_pool_gives_every_owner_a_session_of_its_own() -> None:
    pool = SandboxPool(limits=QUICK, num_warm=1)
    async with pool.session() as one, pool.session() as other:
        await one.write("secret", b"1")
        with pytest.raises(OSError, match="FileNotFoundError"):
            await other.read("secret")
    async with pool.session() as third:
        with pytest.raises(OSError, match="FileNotFoundError"):
            await third.read("secret")
    await pool.close()


class TestRefusal:
    """Where programs cannot be isolated, nothing runs."""

    @pytest.fixture(autouse=True)
    def forget(self) -> object:
        bubblewrap._bwrap.cache_clear()
        yield
        bubblewrap._bwrap.cache_clear()

    async def test_without_bubblewrap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(UnsupportedError, match="apt install bubblewrap"):
            await open_sandbox()
        with pytest.raises(UnsupportedError, match="reward `code`.*apt install bubblewrap"):
            CodeReward(CodeReward.Config())

    async def test_where_it_may_not_do_its_work(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        fake = tmp_path / "bwrap"
        fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
        fake.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda name: str(fake))
        with pytest.raises(UnsupportedError, match=r"may not isolate.*No permissions.*user namespaces"):
            await open_sandbox()


async def test_closing_twice_and_late_is_free(sandbox: Sandbox) -> None:
    started = time.monotonic()
    await sandbox.close()
    await sandbox.close()
    assert time.monotonic() - started < 30

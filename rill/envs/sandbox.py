"""Runs programs that nobody has read: written by a model, possibly hostile.

Called by the code reward and by tool environments. One run is one short-lived process in a folder of its own:

    this process ──▶ launcher: limits, no network, nothing writable but its folder ──▶ the program
                     └── past the deadline, or past the output limit: the whole tree is killed

Always: limits on CPU time, memory, files, disk space and processes; a clean environment; a new session; a deadline on
the wall clock; output cut at a limit. Where the kernel allows: no sockets and no hold on other processes (a system-call
filter), no network and a process tree of its own (namespaces), nothing writable but the folder and nothing readable but
it and Python's own files (Landlock). `protections()` says which of these hold on this machine.

What the checks are and the word that confirms them reach the launcher only once the program has ended, so they lie in
no frame, object or file while it runs, and an answer whose `==` always says yes equals nothing. They run in the same
interpreter all the same: a program that spoke the launcher's protocol could forge a pass. It is a fence for training
runs, not a vault.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
READY = b"ready\n"
"""The launcher's first word when the program has ended."""
DISK_CHECK_S = 0.1
"""How often the program's folder is measured."""
FOLDER_PREFIX = "rill-sandbox-"
ABANDONED_S = 3600.0
"""A folder that old belongs to nobody: the process that made it was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 1 * 2**30
    """Address space of each process."""
    file_bytes: int = 16 * 2**20
    """Size of any one file it writes."""
    num_files: int = 64
    """Open at the same time."""
    folder_bytes: int = 64 * 2**20
    """Of all its files together; more ends it."""
    folder_files: int = 4096
    """In its folder; more ends it."""
    num_processes: int = 1
    """1: it can start none (threads are free). More: at the same time, where it runs as a user of its own."""
    output_bytes: int = 1 * 2**20
    """Of its output; more ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What became of a program."""

    passed: tuple[bool, ...]
    """One entry per check, in order."""
    stdout: str
    exit_code: int | None
    """None: killed."""
    ended: str
    """"ok", "timeout", "output", "disk", "error" (an exception or a non-zero exit)."""
    error: str = ""
    seconds: float = 0.0


def run_python(
    code: str,
    *,
    checks: Sequence[str] = (),
    stdin: str = "",
    limits: Limits | None = None,
    packages: bool = False,
) -> SandboxResult:
    """Run a program, then each check (a piece of Python that must not raise) in its namespace.

    Blocks for at most limits.wall_s and a moment. Checks are confirmed with a secret over a pipe of their own, so a
    program that exits early or prints "passed" has passed nothing. `packages`: installed libraries can be imported,
    not the standard library alone.
    """
    limits = limits or Limits()
    _sweep()
    folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)
    secret = secrets.token_hex(16)
    job = {"code": code, "stdin": stdin, "folder": folder, "limits": asdict(limits)}
    same = f"_same_{secrets.token_hex(8)}"
    asked = {"secret": secret, "same": same, "checks": [_tightened(check, same) for check in checks]}
    questions = json.dumps(asked).encode()
    started = time.monotonic()
    try:
        stdout, report, exit_code, ended = _run(json.dumps(job).encode(), questions, folder, limits, packages)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    passed, error = _read_report(report, secret, len(checks))
    if ended == "ok" and (exit_code != 0 or error):
        ended = "error"
    return SandboxResult(
        passed=passed,
        stdout=stdout.decode(errors="replace"),
        exit_code=exit_code,
        ended=ended,
        error=error,
        seconds=time.monotonic() - started,
    )


def _tightened(check: str, same: str) -> str:
    """The check with `assert a == b` made `assert same(a, b)`: an object of the program's whose `==` always says yes
    equals no plain value then. What does not parse stays as it is and fails when it is run."""
    try:
        tree = ast.parse(check)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return check
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            compared = node.test
            if len(compared.ops) == 1 and isinstance(compared.ops[0], ast.Eq):
                sides = [compared.left, compared.comparators[0]]
                node.test = ast.Call(func=ast.Name(id=same, ctx=ast.Load()), args=sides, keywords=[])
    return ast.unparse(ast.fix_missing_locations(tree))


@lru_cache(maxsize=1)
def protections() -> frozenset[str]:
    """Which of "network", "processes", "files", "reads", "user" and "calls" are fenced off on this machine."""
    result = run_python("import os; print(os.environ['RILL_FENCES'])")
    return frozenset(result.stdout.split())


@lru_cache(maxsize=1)
def _sweep() -> None:
    """Once a process: remove what killed ones left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _run(
    job: bytes, questions: bytes, folder: str, limits: Limits, packages: bool
) -> tuple[bytes, bytes, int | None, str]:
    reports, report_fd = os.pipe()
    question_fd, ask = os.pipe()
    flags = ["-I"] if packages else ["-I", "-S"]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread's stack counts as memory
    process = subprocess.Popen(
        [sys.executable, *flags, str(LAUNCHER), str(report_fd), str(question_fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **one_thread},
        pass_fds=(report_fd, question_fd),
        start_new_session=True,
    )
    os.close(report_fd)
    os.close(question_fd)
    assert process.stdin is not None and process.stdout is not None
    talk = _Talk(stdout=process.stdout.fileno(), reports=reports, ask=ask, questions=questions)
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(job)
        process.stdin.close()
        ended = talk.until_end(Path(folder), limits)
        if ended == "ok":
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                ended = "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        talk.close()
        process.stdout.close()
        process.wait()
    stdout = bytes(talk.heard[talk.stdout][: limits.output_bytes])
    return stdout, bytes(talk.heard[reports]), process.returncode if ended == "ok" else None, ended


class _Talk:
    """The pipes to and from one launcher. The questions are handed over when it reports that the program has ended."""

    def __init__(self, *, stdout: int, reports: int, ask: int, questions: bytes) -> None:
        self.stdout = stdout
        self.heard = {stdout: bytearray(), reports: bytearray()}
        self._reports = reports
        self._ask = ask
        self._questions = memoryview(questions)
        self._poller = select.poll()
        self._open = {stdout, reports}
        for fd in self._open:
            self._poller.register(fd, select.POLLIN | select.POLLHUP)
        os.set_blocking(ask, False)

    def until_end(self, folder: Path, limits: Limits) -> str:
        """Read both pipes until they end, the deadline passes or there is too much; how it ended."""
        deadline = time.monotonic() + limits.wall_s
        is_asked = False
        while self._open:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return "timeout"
            for fd, _ in self._poller.poll(min(left_s, DISK_CHECK_S) * 1000):
                if fd == self._ask:
                    self._hand_over()
                else:
                    self._hear(fd)
            if not is_asked and self.heard[self._reports].startswith(READY):
                is_asked = True
                self._poller.register(self._ask, select.POLLOUT)
            if any(len(buffer) > limits.output_bytes for buffer in self.heard.values()):
                return "output"
            if _is_over(folder, limits):
                return "disk"
        return "ok"

    def close(self) -> None:
        os.close(self._reports)
        if self._ask >= 0:
            os.close(self._ask)

    def _hear(self, fd: int) -> None:
        chunk = os.read(fd, 65_536)
        if not chunk:
            self._poller.unregister(fd)
            self._open.discard(fd)
        self.heard[fd] += chunk

    def _hand_over(self) -> None:
        try:
            self._questions = self._questions[os.write(self._ask, self._questions) :]
        except OSError:  # the launcher is gone
            self._questions = self._questions[:0]
        if not self._questions:
            self._poller.unregister(self._ask)
            os.close(self._ask)
            self._ask = -1


def _is_over(folder: Path, limits: Limits) -> bool:
    """Whether the program's files are too many or too large together."""
    num_files = num_bytes = 0
    for where, folders, files in os.walk(folder):
        num_files += len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                num_bytes += os.lstat(os.path.join(where, name)).st_blocks * 512
        if num_files > limits.folder_files or num_bytes > limits.folder_bytes:
            return True
    return False


def _read_report(report: bytes, secret: str, num_checks: int) -> tuple[tuple[bool, ...], str]:
    """Lines of "secret index" for checks that passed, "error text" for the first failure, READY before them."""
    passed, error = [False] * num_checks, ""
    for line in report.decode(errors="replace").splitlines():
        word, _, rest = line.partition(" ")
        if word == secret and rest.isdigit() and int(rest) < num_checks:
            passed[int(rest)] = True
        elif word == "error" and not error:
            error = rest[:500]
    return tuple(passed), error

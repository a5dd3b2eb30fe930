"""Runs programs that nobody has read: written by a model, possibly hostile.

Called by the code reward and by tool environments. One run is one short-lived process in a folder of its own:

    this process ──▶ launcher: limits, no network, nothing writable but its folder ──▶ the program
                     └── past the deadline, or past the output limit: the whole tree is killed

Always: limits on CPU time, memory, file size, open files and processes; a clean environment; a new session; a
deadline on the wall clock; output cut at a limit. Where the kernel allows: no network and a process tree of its
own (namespaces), no writing outside the folder (Landlock), no further processes (a system-call filter).
`protections()` says which of these hold on this machine. It is a fence for training runs, not a vault: keep secrets
off machines that run strangers' code.
"""

from __future__ import annotations

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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")


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
    """"ok", "timeout", "output", "error" (an exception or a non-zero exit)."""
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
    folder = tempfile.mkdtemp(prefix="rill-sandbox-")
    secret = secrets.token_hex(16)
    job = {"code": code, "checks": list(checks), "stdin": stdin, "secret": secret, "folder": folder}
    job["limits"] = {name: getattr(limits, name) for name in Limits.__slots__}  # type: ignore[assignment]
    started = time.monotonic()
    try:
        stdout, report, exit_code, ended = _run(json.dumps(job).encode(), folder, limits, packages)
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


@lru_cache(maxsize=1)
def protections() -> frozenset[str]:
    """Which of "network", "processes", "files", "user", "forks" the kernel lets the launcher fence off here."""
    result = run_python("import os; print(os.environ['RILL_FENCES'])")
    return frozenset(result.stdout.split())


def _run(job: bytes, folder: str, limits: Limits, packages: bool) -> tuple[bytes, bytes, int | None, str]:
    read_fd, write_fd = os.pipe()
    flags = ["-I"] if packages else ["-I", "-S"]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread's stack counts as memory
    process = subprocess.Popen(
        [sys.executable, *flags, str(LAUNCHER), str(write_fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", **one_thread},
        pass_fds=(write_fd,),
        start_new_session=True,
    )
    os.close(write_fd)
    assert process.stdin is not None and process.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(job)
        process.stdin.close()
        with os.fdopen(read_fd, "rb", buffering=0) as reports:
            stdout, report, ended = _collect(process.stdout, reports, limits)
        if ended == "ok":
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                ended = "timeout"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()
    return stdout, report, process.returncode if ended == "ok" else None, ended


def _collect(stdout: IO[bytes], reports: IO[bytes], limits: Limits) -> tuple[bytes, bytes, str]:
    """Read both pipes until they end, the deadline passes or there is too much."""
    deadline = time.monotonic() + limits.wall_s
    data: dict[int, bytearray] = {stdout.fileno(): bytearray(), reports.fileno(): bytearray()}
    opened, ended = set(data), "ok"
    poller = select.poll()
    for fd in opened:
        poller.register(fd, select.POLLIN | select.POLLHUP)
    while opened:
        left_s = deadline - time.monotonic()
        events = poller.poll(max(left_s, 0) * 1000) if left_s > 0 else []
        if not events:
            ended = "timeout"
            break
        for fd, _ in events:
            chunk = os.read(fd, 65_536)
            if not chunk:
                poller.unregister(fd)
                opened.discard(fd)
            data[fd] += chunk
        if any(len(buffer) > limits.output_bytes for buffer in data.values()):
            ended = "output"
            break
    return bytes(data[stdout.fileno()][: limits.output_bytes]), bytes(data[reports.fileno()]), ended


def _read_report(report: bytes, secret: str, num_checks: int) -> tuple[tuple[bool, ...], str]:
    """Lines of "secret index" for checks that passed, "error text" for the first failure."""
    passed, error = [False] * num_checks, ""
    for line in report.decode(errors="replace").splitlines():
        word, _, rest = line.partition(" ")
        if word == secret and rest.isdigit() and int(rest) < num_checks:
            passed[int(rest)] = True
        elif word == "error" and not error:
            error = rest[:500]
    return tuple(passed), error

"""A sandbox made by bubblewrap (`apt install bubblewrap`): namespaces of its own for processes, network and files.

    rill ── pipe ──▶ bwrap ── a new root: libraries read-only, /sandbox and /tmp in memory ──▶ guest.py ──▶ programs

The guest answers one request at a time. It runs what nobody has read and may be taken over by it, so nothing that it
says is believed: answers are bounded in size and time, and a session that breaks the rules is ended, with all in it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rill.envs.sandbox.base import Limits, Result, SandboxError
from rill.errors import UnsupportedError

GUEST = Path(__file__).with_name("guest.py")
GUEST_CHECKS = Path(__file__).with_name("guest_checks.py")
LENGTH = struct.Struct("<I")
START_S = 30.0
GRACE_S = 2.0
"""Beyond the limit of a command, until the guest itself is taken to hang."""
INSTALL = "install it with `apt install bubblewrap` (Fedora: dnf, Arch: pacman -S bubblewrap)"


class Bubblewrap:
    """One session. rill.envs.sandbox.base.Sandbox."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._turn = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def open(cls, limits: Limits, *, packages: bool = False) -> Bubblewrap:
        process = await asyncio.create_subprocess_exec(
            *command(limits, packages=packages),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
            limit=2**16,
        )
        session = cls(process, limits)
        try:
            folders = _package_folders() if packages else []
            await session.request({**asdict(limits), "packages": folders}, START_S)
        except (SandboxError, asyncio.CancelledError) as error:
            await session.close()
            assert process.stderr is not None
            said = (await process.stderr.read(2000)).decode(errors="replace").strip()
            if isinstance(error, SandboxError):
                raise SandboxError(f"the sandbox did not start: {said or error}") from error
            raise
        return session

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None
    ) -> Result:
        return await self._run({"op": "exec", "argv": list(argv)}, stdin, timeout_s)

    async def python(self, code: str, *, stdin: bytes = b"", timeout_s: float | None = None) -> Result:
        return await self._run({"op": "python", "code": code}, stdin, timeout_s)

    async def read(self, path: str) -> bytes:
        answer = await self.request(
            {"op": "read", "path": path, "max_bytes": self._limits.disk_bytes}, self._limits.exec_s
        )
        return base64.b64decode(_checked(answer, "data", str))

    async def write(self, path: str, data: bytes) -> None:
        message = {"op": "write", "path": path, "data": base64.b64encode(data).decode()}
        _checked(await self.request(message, self._limits.exec_s), "ok", bool)

    async def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One request and its answer. A guest that is late, gone or talks nonsense is ended."""
        async with self._turn:
            try:
                async with asyncio.timeout(timeout_s):
                    await self.send(message)
                    return await self.receive()
            except (TimeoutError, asyncio.CancelledError, SandboxError) as error:
                await self.close()
                if isinstance(error, TimeoutError):
                    raise SandboxError(f"no answer within {timeout_s:g} s") from None
                raise

    async def send(self, message: dict[str, Any]) -> None:
        if self._is_closed:
            raise SandboxError("the session is closed")
        assert self._process.stdin is not None
        data = json.dumps(message).encode("utf-8", "surrogatepass")
        try:
            self._process.stdin.write(LENGTH.pack(len(data)) + data)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise SandboxError("the session has ended") from None

    async def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            (length,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
            if length > 4 * (self._limits.output_bytes + self._limits.disk_bytes):
                raise SandboxError("the session answers with more than its limits allow")
            answer = json.loads(await self._process.stdout.readexactly(length))
        except asyncio.IncompleteReadError:
            raise SandboxError("the session has ended") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise SandboxError(f"the session talks nonsense: {error}") from None
        if not isinstance(answer, dict):
            raise SandboxError("the session talks nonsense: not an object")
        return answer

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the first of a process tree takes all with it
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _run(self, message: dict[str, Any], stdin: bytes, timeout_s: float | None) -> Result:
        limit_s = self._limits.exec_s if timeout_s is None else timeout_s
        message |= {
            "stdin": base64.b64encode(stdin).decode(),
            "timeout_s": limit_s,
            "output_bytes": self._limits.output_bytes,
        }
        answer = await self.request(message, limit_s + GRACE_S)
        return Result(
            exit_code=_checked(answer, "code", int),
            stdout=_bytes(answer, "stdout")[: self._limits.output_bytes],
            stderr=_bytes(answer, "stderr")[: self._limits.output_bytes],
            ended=_checked(answer, "ended", str),
        )


def _checked(answer: dict[str, Any], key: str, kind: type[Any]) -> Any:
    if "error" in answer:
        raise OSError(str(answer["error"])[:500])
    if not isinstance(answer.get(key), kind):
        raise SandboxError(f"the session talks nonsense: {key} is {answer.get(key)!r:.80}")
    return answer[key]


def _bytes(answer: dict[str, Any], key: str) -> bytes:
    try:
        return base64.b64decode(_checked(answer, key, str))
    except ValueError:
        raise SandboxError(f"the session talks nonsense: {key}") from None


# --- the command line --------------------------------------------------------------------------------------


def command(limits: Limits, *, packages: bool) -> list[str]:
    """Raises UnsupportedError where bubblewrap is absent or may not do its work here."""
    bwrap, is_root = _bwrap(), os.geteuid() == 0
    users = (
        ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # the guest becomes nobody first of all
        if is_root
        else ["--unshare-user", "--disable-userns"]
    )
    return [
        bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        *users, "--die-with-parent", "--new-session", "--clearenv",
        *(word for key, value in _ENVIRONMENT.items() for word in ("--setenv", key, value)),
        "--proc", "/proc", "--dev", "/dev",
        *(word for folder in ("/sandbox", "/tmp") for word in
          ("--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", folder)),
        *_readable(packages), "--ro-bind", str(GUEST), "/guest.py", "--ro-bind", str(GUEST_CHECKS), "/guest_checks.py",
        "--chdir", "/sandbox",
        os.path.realpath(sys.executable), "-I", "-S", "/guest.py",
    ]  # fmt: skip


_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/sandbox",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def _readable(packages: bool) -> list[str]:
    """The system's libraries and programs, and Python's own files."""
    words: list[str] = []
    for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        place = Path(folder)
        if place.is_symlink():
            words += ["--symlink", str(place.readlink()), folder]
        elif place.is_dir():
            words += ["--ro-bind", folder, folder]
    words += ["--ro-bind", "/usr", "/usr", "--perms", "0755", "--dir", "/etc"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        words += ["--ro-bind-try", path, path]
    python = {sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parents[1])}
    for folder in sorted(python | set(_package_folders() if packages else ())):
        if not folder.startswith("/usr/") and folder != "/usr":
            for parent in reversed(Path(folder).parents[:-1]):  # or they would be root's alone
                words += ["--perms", "0755", "--dir", str(parent)]
            words += ["--ro-bind", folder, folder]
    return words


def _package_folders() -> list[str]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(os.path.realpath(paths[name]) for name in ("purelib", "platlib")))


@functools.lru_cache(maxsize=1)
def _bwrap() -> str:
    """Tried once: namespaces may be forbidden where the program is there."""
    found = shutil.which("bwrap")
    if found is None:
        raise UnsupportedError(f"programs nobody has read run in bubblewrap, which is not here: {INSTALL}")
    places = ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    probe = [found, "--unshare-pid", "--unshare-net", *places, "true"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=START_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnsupportedError(f"bubblewrap cannot be started: {error}") from error
    if done.returncode != 0:
        raise UnsupportedError(
            f"bubblewrap may not isolate programs on this machine ({done.stderr.decode(errors='replace').strip()}): "
            "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or a container with CAP_SYS_ADMIN)"
        )
    return found


def missing() -> str | None:
    """What keeps sandboxes from working here; None: nothing."""
    try:
        _bwrap()
    except UnsupportedError as error:
        return str(error)
    return None

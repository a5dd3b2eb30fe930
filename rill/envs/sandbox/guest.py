"""The inside of a sandbox: takes requests from its pipe and carries them out. See session.py.

Uses the standard library alone and is started with -I -S, so that it is up in some milliseconds. Whatever runs here may
take this process over: the outside reads its answers as data from a stranger, and throws it away afterwards.

    exec, python, read, write      a session: commands and programs one after the other, files between them
    load, do, check                programs and their checks (guest_checks.py)
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import json
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import time

TYPE_CHECKING = False  # typing's own would cost every sandbox some milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LENGTH = struct.Struct("<I")
FIRST_UID, NUM_UIDS = 200_000, 50_000
CHUNK = 65_536
POLL_S = 0.01
CHECKS_SOURCE = sys.argv[1] if __name__ == "__main__" and len(sys.argv) > 1 else ""


def main() -> None:
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    limits = channel.read()
    sys.path += limits["packages"]
    if not limits["contained"]:
        become_nobody()
    set_limits(limits)
    channel.write({"ok": True})
    session = Session(channel, limits)
    while (request := channel.read()) is not None:
        channel.write(session.answer(request))


class Channel:
    """Frames of JSON over two pipes."""

    def __init__(self, source: int, sink: int) -> None:
        self.fds = (source, sink)
        for fd in self.fds:
            os.set_inheritable(fd, False)

    def read(self) -> Any:
        head = self._take(LENGTH.size)
        return None if head is None else json.loads(self._take(LENGTH.unpack(head)[0]) or b"null")

    def write(self, value: Any) -> None:
        data = json.dumps(value).encode("utf-8", "surrogatepass")
        data = LENGTH.pack(len(data)) + data
        while data:
            data = data[os.write(self.fds[1], data) :]

    def _take(self, count: int) -> bytes | None:
        data = b""
        while len(data) < count:
            chunk = os.read(self.fds[0], min(CHUNK, count - len(data)))
            if not chunk:
                return None
            data += chunk
        return data


def become_nobody() -> None:
    """Where the sandbox was made by root: a user that owns nothing, and that no other sandbox is likely to share."""
    if os.getuid() != 0:
        return
    uid = FIRST_UID + int.from_bytes(os.urandom(4), "little") % NUM_UIDS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def set_limits(limits: dict[str, Any]) -> None:
    """For this process and all that come of it. A container counts its processes itself: its user is everybody's."""
    for kind, value in (
        (resource.RLIMIT_NPROC, limits["num_processes"] + 1),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_files"]),
        (resource.RLIMIT_CORE, 0),
    )[limits["contained"] :]:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


class Session:
    def __init__(self, channel: Channel, limits: dict[str, Any]) -> None:
        self.channel = channel
        self.limits = limits
        self.program: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request["op"]:
                case "exec":
                    return self.run(request, lambda pipes: start_command(request["argv"], pipes))
                case "python":
                    return self.run(request, lambda pipes: self.fork(request["code"], pipes))
                case "read":
                    return {"data": read_file(request["path"], request["max_bytes"])}
                case "write":
                    return write_file(request["path"], base64.b64decode(request["data"]))
                case "load":
                    self.program = checks().Program()
                    return dict(self.program.load(request["code"]))
                case "do":
                    return dict(self.program.do(request))
                case "check":
                    return self.check(request)
                case other:
                    return {"error": f"no such request: {other}"}
        except OSError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def run(self, request: dict[str, Any], start: Callable[[list[int]], int]) -> dict[str, Any]:
        """A process with its input, until it ends, its time is over or it says too much."""
        pipes = [*os.pipe(), *os.pipe(), *os.pipe()]
        try:
            pid = start(pipes)
        except (OSError, ValueError) as error:
            for fd in pipes:
                os.close(fd)
            said = base64.b64encode(f"{type(error).__name__}: {error}".encode()).decode()
            return {"code": 127, "stdout": "", "stderr": said, "ended": "error"}
        for fd in (pipes[0], pipes[3], pipes[5]):
            os.close(fd)
        given = base64.b64decode(request.get("stdin", ""))
        heard, ended = Talk(pid, pipes[1], (pipes[2], pipes[4]), given).until_end(
            request["timeout_s"], request["output_bytes"]
        )
        # What it started and left running goes with it; its own status stays what it was.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if ended == "ok" and code != 0:
            ended = "error"
        out, err = (base64.b64encode(each).decode() for each in heard)
        return {"code": code, "stdout": out, "stderr": err, "ended": ended}

    def fork(self, code: str, pipes: list[int]) -> int:
        """A Python program in a copy of this process: no interpreter has to start."""
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            return pid
        status = 1
        try:
            os.setpgid(0, 0)
            for fd, number in ((pipes[0], 0), (pipes[3], 1), (pipes[5], 2)):
                os.dup2(fd, number)
            os.closerange(3, 64)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode) for n, mode in enumerate("rww"))
            sys.argv = ["program"]
            status = run_main(code)
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """In a copy of this process, which talks to the outside while it lives."""
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            return {"done": status == 0}
        status = 1
        try:
            checks().Checker(self.channel, request).run()
            status = 0
        finally:
            os._exit(status)


def checks() -> Any:
    """guest_checks.py, which most sessions never need. In a container it is an argument of ours."""
    if CHECKS_SOURCE:
        module = type(sys)("guest_checks")
        sys.modules["guest_checks"] = module
        exec(compile(CHECKS_SOURCE, "guest_checks.py", "exec"), module.__dict__)
        return module
    sys.path.insert(0, "/")
    try:
        return __import__("guest_checks")
    finally:
        sys.path.remove("/")


def start_command(argv: list[str], pipes: list[int]) -> int:
    process = subprocess.Popen(
        argv, stdin=pipes[0], stdout=pipes[3], stderr=pipes[5], start_new_session=True, close_fds=True
    )
    process.returncode = 0  # waited for by us
    return process.pid


def run_main(code: str) -> int:
    """As a script would be run; its exit code."""
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__", "__builtins__": builtins})
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001  boundary: a program may raise anything
        import traceback

        traceback.print_exc()
        return 1
    return 0


class Talk:
    """Feeds a process its input and collects both outputs, until it has ended."""

    def __init__(self, pid: int, sink: int, sources: tuple[int, int], given: bytes) -> None:
        self.pid = pid
        try:
            self.exit = os.pidfd_open(pid)
        except OSError:  # gVisor, and Docker's filter of 2020, have none: it is looked for
            self.exit = -1
        self.sink = sink
        self.given = given
        self.sources = sources
        self.heard = {fd: bytearray() for fd in sources}
        self.selector = selectors.DefaultSelector()
        for fd in (*sources, *([self.exit] if self.exit >= 0 else [])):
            self.selector.register(fd, selectors.EVENT_READ)
        for fd in (sink, *sources):
            os.set_blocking(fd, False)
        self.selector.register(sink, selectors.EVENT_WRITE)

    def until_end(self, timeout_s: float, limit: int) -> tuple[list[bytes], str]:
        deadline, ended = time.monotonic() + timeout_s, ""
        while not ended:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                ended = "timeout"
            if self.exit < 0:
                left_s = min(left_s, POLL_S)
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    ended = ended or "ok"
            for key, _ in self.selector.select(0.0 if ended else max(0.0, left_s)):
                if key.fd == self.exit:
                    ended = ended or "ok"
                elif key.fd == self.sink:
                    self.feed()
                else:
                    self.hear(key.fd)
            if sum(map(len, self.heard.values())) > limit:
                ended = "output"
        for fd in self.sources:  # what stands in the pipes when it is over
            while ended == "ok" and self.hear(fd) and len(self.heard[fd]) <= limit:
                pass
        self.selector.close()
        for fd in (self.exit, *self.sources, self.sink):
            if fd >= 0:
                os.close(fd)
        return [bytes(self.heard[fd][:limit]) for fd in self.sources], ended

    def feed(self) -> None:
        try:
            self.given = self.given[os.write(self.sink, self.given[:CHUNK]) :] if self.given else b""
        except OSError:
            self.given = b""
        if not self.given:
            self.selector.unregister(self.sink)
            os.close(self.sink)
            self.sink = -1

    def hear(self, fd: int) -> bool:
        """Whether there was something."""
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        self.heard[fd] += chunk
        if not chunk and fd in self.selector.get_map():
            self.selector.unregister(fd)
        return bool(chunk)


def read_file(path: str, max_bytes: int) -> str:
    with open(path, "rb") as file:
        return base64.b64encode(file.read(max_bytes)).decode()


def write_file(path: str, data: bytes) -> dict[str, Any]:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return {"ok": True}


if __name__ == "__main__":
    main()

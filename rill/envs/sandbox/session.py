"""One session with a guest (guest.py) that some fence holds: bubblewrap.py and container.py start it, this talks to it.

The guest answers one request at a time. It runs what nobody has read and may be taken over by it, so nothing that it
says is believed: answers are bounded in size and time, and a session that breaks the rules is ended, with all in it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rill.envs.sandbox.base import Limits, Result, SandboxError

GUEST = Path(__file__).with_name("guest.py")
GUEST_CHECKS = Path(__file__).with_name("guest_checks.py")
LENGTH = struct.Struct("<I")
START_S = 30.0
GRACE_S = 2.0
"""Beyond the limit of a command, until the guest itself is taken to hang."""
ENVIRONMENT = {"HOME": "/sandbox", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Nothing of ours."""


class Sandbox:
    """One session. Its files stay from one call to the next; calls run one after the other."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._turn = asyncio.Lock()
        self._is_closed = False

    @property
    def has_ended(self) -> bool:
        return self._is_closed or self._process.returncode is not None

    async def greet(self, hello: Mapping[str, Any]) -> None:
        """Give the guest its limits, and wait until it has taken them. One that does not is ended."""
        try:
            await self.request({**asdict(self._limits), **hello}, START_S)
        except (SandboxError, asyncio.CancelledError) as error:
            await self.close()
            assert self._process.stderr is not None
            said = (await self._process.stderr.read(2000)).decode(errors="replace").strip()
            if isinstance(error, SandboxError):
                raise SandboxError(f"the sandbox did not start: {said or error}") from error
            raise

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None
    ) -> Result:
        return await self._run({"op": "exec", "argv": list(argv)}, stdin, timeout_s)

    async def python(self, code: str, *, stdin: bytes = b"", timeout_s: float | None = None) -> Result:
        """A Python program; quicker than exec, as no interpreter has to start."""
        return await self._run({"op": "python", "code": code}, stdin, timeout_s)

    async def read(self, path: str) -> bytes:
        """Raises OSError with the name of the error that the session met."""
        answer = await self.request(
            {"op": "read", "path": path, "max_bytes": self._limits.disk_bytes}, self._limits.exec_s
        )
        return _bytes(answer, "data")

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
        """End everything in it. May be called twice."""
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


async def still_living(ready: list[Sandbox]) -> Sandbox | None:
    """One of those that are ready, no longer among them; those that have ended by themselves are closed."""
    while ready:
        sandbox = ready.pop(0)
        if not sandbox.has_ended:
            return sandbox
        await sandbox.close()
    return None


async def start_guest(argv: Sequence[str], env: Mapping[str, str]) -> asyncio.subprocess.Process:
    """In a process group of its own, which close() ends."""
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
        limit=2**16,
    )

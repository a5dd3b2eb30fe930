"""Whether a program passes its checks, decided where the program cannot reach.

    program's sandbox ◀── call f(1, 2) ── rill ◀── f(1, 2)? ── checker's sandbox: assert f(1, 2) == 3
                      ──── 3 ─────────▶        ──── 3 ──────▶                     passed

Two sandboxes: the program's holds the program alone, the checker's the checks alone. What a check expects never comes
near the program, what the program returns arrives as plain data, and the names `abs`, `sum`, `math` … mean the
checker's own. A program can search its frames, change built-in functions or run on in a thread; nothing passes by it.
"""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rill.envs.per_loop import PerLoop
from rill.envs.sandbox.base import SandboxError, open_sandbox
from rill.envs.sandbox.session import Sandbox, still_living


class Checkers:
    """Checker's sandboxes, kept from one program to the next: nothing hostile has run in them."""

    def __init__(self, open_checker: Callable[[], Awaitable[Sandbox]] = open_sandbox) -> None:
        self._open = open_checker
        self._idle: PerLoop[list[Sandbox]] = PerLoop(list)

    async def check(self, program: Sandbox, code: str, checks: Sequence[str], timeout_s: float) -> list[bool]:
        """Load the code into the program's sandbox, and ask it what the checks want to know: which of them pass."""
        passed = [False] * len(checks)
        idle = self._idle()
        # Its start is not the program's time.
        checker = await still_living(idle) or await self._open()
        try:
            deadline = time.monotonic() + timeout_s
            if await _is_loaded(program, code, timeout_s):
                async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                    passed = await _Conversation(program, checker, deadline).run(code, checks)
        except BaseException as error:
            await checker.close()
            if isinstance(
                error, TimeoutError | SandboxError
            ):  # a check without end, or that ends its sandbox
                return passed
            raise
        idle.append(checker)
        return passed

    async def close(self) -> None:
        """Those of this event loop; those of loops that have ended go with their pipes."""
        for checker in self._idle():
            await checker.close()


async def _is_loaded(program: Sandbox, code: str, timeout_s: float) -> bool:
    """Whether the program can be asked."""
    try:
        loaded = await program.request({"op": "load", "code": code}, timeout_s)
    except SandboxError:
        return False
    return loaded.get("ok") is True


class _Conversation:
    def __init__(self, program: Sandbox, checker: Sandbox, deadline: float) -> None:
        self._program = program
        self._checker = checker
        self._deadline = deadline
        self._gone: str | None = None

    async def run(self, code: str, checks: Sequence[str]) -> list[bool]:
        passed: list[bool] = []
        tree = parsed(code)
        question = {"op": "check", "imported": imported_names(tree), "defined": defined_names(tree)}
        await self._checker.send({**question, "checks": list(checks)})
        while len(passed) < len(checks):
            said = await self._checker.receive()
            if "what" in said:
                await self._checker.send(await self._answer(said))
            else:
                passed.append(said.get("passed") is True)
        await self._checker.receive()
        return passed

    async def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The program's; once it is gone, every question is answered by an exception."""
        if self._gone is None:
            try:
                left_s = max(0.05, self._deadline - time.monotonic() - 0.05)
                return await self._program.request({"op": "do", **question}, left_s)
            except SandboxError as error:
                self._gone = f"the program: {error}"
        return {"raised": "ProgramError", "text": self._gone}


def parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def defined_names(tree: ast.Module) -> list[str]:
    """Functions and classes."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node.name for node in tree.body if isinstance(node, kinds)]


def imported_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names that a program takes from the standard library or a package, as (module, attribute): a check that uses
    one gets the real thing, whatever the program has made of it."""
    names: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {a.asname: (a.name, "") for a in node.names if a.asname is not None}
            names |= {a.name: (a.name, "") for a in node.names if a.asname is None and "." not in a.name}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {a.asname or a.name: (node.module, a.name) for a in node.names if a.name != "*"}
    return {name: where for name, where in names.items() if where[0].partition(".")[0] != "__main__"}

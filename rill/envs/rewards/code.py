"""Code, judged by running its tests in sandboxes.

The tests are `prompt.metadata["tests"]`, or the answer itself, in one of three shapes:

    ["assert add(1, 2) == 3", …]                      run beside the program, which answers what they ask
    {"inputs": ["1 2\\n", …], "outputs": ["3\\n", …]}   one run per pair: text in, text out
    "assert …\\nassert …"                              one check

A program gets a sandbox of its own and never sees what is expected of it (sandbox/checks.py).
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rill.envs.rewards.base import Isolation, RewardConfig
from rill.envs.sandbox.base import Limits, SandboxError, missing
from rill.envs.sandbox.checks import Checkers
from rill.envs.sandbox.pool import SandboxPool
from rill.envs.sandbox.session import Sandbox
from rill.errors import ConfigError, UnsupportedError
from rill.types import Prompt, Trajectory


class CodeReward:
    class Config(RewardConfig):
        type: Literal["code"] = "code"
        partial: bool = False
        """On: the share of tests that pass. Off: 1 if all do, else 0."""
        wall_s: float = Field(default=10.0, gt=0)
        """Time limit of one run of the program."""
        memory_bytes: int = Field(default=2**30, ge=2**26)
        packages: bool = False
        """Let programs import installed libraries (numpy …), not the standard library alone."""
        sandbox: Literal["bubblewrap", "container"] = "bubblewrap"
        """Where programs run. A machine that cannot isolate them so is refused at the start."""
        image: str = ""
        """Of the container: one with Python, e.g. "python:3.12-slim"."""
        runtime: str = ""
        """Of the container: "runsc" is gVisor; unset: that of docker or podman."""
        max_concurrent: int | None = Field(default_factory=lambda: max(2, os.cpu_count() or 1), ge=1)
        max_tests: int = Field(default=64, ge=1)
        """Only the first so many tests are run."""

    isolation = Isolation.ASYNC

    def __init__(self, config: Config) -> None:
        options: dict[str, Any] = {"image": config.image, "runtime": config.runtime}
        if config.sandbox == "bubblewrap":
            if any(options.values()):
                raise ConfigError(
                    'reward `code`: image and runtime are of containers: set sandbox = "container"'
                )
            options = {}
        if (problem := missing(config.sandbox, **options)) is not None:
            raise UnsupportedError(f"reward `code`: {problem}")
        self.config = config
        limits = Limits(exec_s=config.wall_s, memory_bytes=config.memory_bytes)
        self._pool = SandboxPool(config.sandbox, limits, packages=config.packages, **options)
        self._checkers = Checkers(self._pool.open)

    async def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        tests = prompt.metadata.get("tests", prompt.answer)
        check_tests(prompt.id, tests)
        code = extract_code(response_text)
        if code is None:
            return 0.0
        async with self._pool.session() as sandbox:
            if isinstance(tests, Mapping):
                passed = await self._run_pairs(sandbox, code, tests)
            else:
                checks = [tests] if isinstance(tests, str) else list(tests)[: self.config.max_tests]
                passed = await self._checkers.check(sandbox, code, checks, self.config.wall_s)
        share = sum(passed) / len(passed)
        return share if self.config.partial else float(share == 1.0)

    async def _run_pairs(self, sandbox: Sandbox, code: str, tests: Mapping[str, Any]) -> list[bool]:
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))[: self.config.max_tests]
        passed: list[bool] = []
        try:
            for given, expected in pairs:
                result = await sandbox.python(code, stdin=str(given).encode())
                said = result.stdout.decode("utf-8", "replace")
                passed.append(result.ended == "ok" and same_output(said, str(expected)))
                if not passed[-1] and not self.config.partial:
                    break  # one failure decides
        except SandboxError:  # the program has ended the session it runs in
            pass
        return passed + [False] * (len(pairs) - len(passed))


def check_tests(prompt_id: str, tests: Any) -> None:
    """Raises ValueError where nothing would be tested: any program would pass."""
    if isinstance(tests, Mapping):
        inputs, outputs = list(tests.get("inputs", ())), list(tests.get("outputs", ()))
        if not inputs or len(inputs) != len(outputs):
            raise ValueError(
                f"prompt {prompt_id}: {len(inputs)} inputs and {len(outputs)} outputs do not pair"
            )
        return
    checks: Sequence[Any] = [tests] if isinstance(tests, str) else tests
    if not isinstance(checks, list | tuple) or not checks:
        raise ValueError(f"prompt {prompt_id} has no tests in metadata['tests'] or its answer")
    for check in checks:
        try:
            tree = ast.parse(str(check))
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"prompt {prompt_id}: the test {check!r:.80} is not Python: {error}") from error
        if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
            raise ValueError(
                f"prompt {prompt_id}: the test {check!r:.80} asserts nothing, so any program would pass it"
            )


def extract_code(text: str) -> str | None:
    """The last fenced block; the whole text when there is no fence; None when a fence was never closed."""
    if "```" not in text:
        return text.strip() or None
    parts = text.split("```")
    if len(parts) % 2 == 0:
        parts = parts[:-1]  # an unclosed last fence was cut off
    if len(parts) < 3:
        return None
    head, _, body = parts[-2].partition("\n")
    return body if head.strip().isalnum() or not head.strip() else parts[-2]


def same_output(given: str, expected: str) -> bool:
    """Line by line, blanks at line ends and empty last lines ignored."""
    return [line.rstrip() for line in given.rstrip().splitlines()] == [
        line.rstrip() for line in expected.rstrip().splitlines()
    ]

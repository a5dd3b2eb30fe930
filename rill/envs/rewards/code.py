"""Code, judged by running its tests in the sandbox.

The tests are `prompt.metadata["tests"]`, or the answer itself, in one of three shapes:

    ["assert add(1, 2) == 3", …]                      run after the program, in its namespace
    {"inputs": ["1 2\\n", …], "outputs": ["3\\n", …]}   one run per pair: text in, text out
    "assert …\\nassert …"                              one check
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

from pydantic import Field

from rill.envs.rewards.base import Isolation, RewardConfig
from rill.envs.sandbox import Limits, SandboxResult, run_python
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
        max_concurrent: int | None = Field(default_factory=lambda: max(2, os.cpu_count() or 1), ge=1)
        max_tests: int = Field(default=64, ge=1)
        """Only the first so many tests are run."""

    isolation = Isolation.ASYNC

    def __init__(self, config: Config) -> None:
        self.config = config
        self._limits = Limits(
            wall_s=config.wall_s, cpu_s=max(1, round(config.wall_s)), memory_bytes=config.memory_bytes
        )
        # Of its own: in the event loop's shared pool a program would wait for others while its deadline runs. Twice
        # the places, because a program whose score was given up on holds its thread until it is ended.
        self._threads = ThreadPoolExecutor(2 * (config.max_concurrent or 1), thread_name_prefix="rill-code")

    async def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        code = extract_code(response_text)
        tests = prompt.metadata.get("tests", prompt.answer)
        if code is None:
            return 0.0
        if isinstance(tests, Mapping):
            passed = await self._run_pairs(code, tests, prompt.id)
        elif isinstance(tests, str | list | tuple) and tests:
            checks = [tests] if isinstance(tests, str) else list(tests)[: self.config.max_tests]
            result = await self._run(code, checks=checks)
            passed = list(result.passed)
        else:
            raise ValueError(f"prompt {prompt.id} has no tests in metadata['tests'] or its answer")
        share = sum(passed) / len(passed)
        return share if self.config.partial else float(share == 1.0)

    async def _run(self, code: str, *, checks: Sequence[str] = (), stdin: str = "") -> SandboxResult:
        work = partial(
            run_python, code, checks=checks, stdin=stdin, limits=self._limits, packages=self.config.packages
        )
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _run_pairs(self, code: str, tests: Mapping[str, Any], prompt_id: str) -> list[bool]:
        inputs, outputs = list(tests.get("inputs", ())), list(tests.get("outputs", ()))
        if not inputs or len(inputs) != len(outputs):
            raise ValueError(
                f"prompt {prompt_id}: {len(inputs)} inputs and {len(outputs)} outputs do not pair"
            )
        passed = []
        for given, expected in list(zip(inputs, outputs, strict=True))[: self.config.max_tests]:
            result = await self._run(code, stdin=str(given))
            passed.append(result.ended == "ok" and same_output(result.stdout, str(expected)))
            if not passed[-1] and not self.config.partial:
                break  # one failure decides
        return passed


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

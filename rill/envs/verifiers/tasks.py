"""The tasks of a verifiers package as a data set.

    [data]
    type = "verifiers"
    python = "~/vf/bin/python"
    id = "glossary"

They are read once, in the user's Python, when the data set is opened; a prompt keeps what its environment server has to
be told, so `[rollout.env]` names the same package.
"""

from __future__ import annotations

import json
import time
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from rill.data.base import DatasetConfig, Split, content_key, on_side
from rill.envs.verifiers.server import Guest, SourceConfig
from rill.errors import DataError
from rill.types import Message, Prompt

RUN = "verifiers"
"""In a prompt's metadata: which task to run."""


class VerifiersTasks:
    class Config(SourceConfig, DatasetConfig):
        type: Literal["verifiers"] = "verifiers"
        limit: int = Field(default=1000, ge=0)
        """Use the first so many tasks; some packages go on for ever. 0: all."""

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        source = config.model_dump_json(include={"python", "id", "arguments", "limit", "start_timeout_s"})
        prompts = read_tasks(source)
        self._prompts = [p for p in prompts if on_side(_key(p), config.held_out, split)]

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


@lru_cache(maxsize=4)
def read_tasks(source: str) -> list[Prompt]:
    """Of a configuration as JSON. Both sides of a data set are read from one start of the user's Python."""
    config = VerifiersTasks.Config.model_validate_json(source)
    guest = Guest(config, "tasks", config.limit)
    prompts: list[Prompt] = []
    deadline = time.monotonic() + config.start_timeout_s
    try:
        while line := guest.line(max(0.0, deadline - time.monotonic())):
            prompts.append(_prompt(json.loads(line), config.id, len(prompts)))
    finally:
        guest.close()
    if not prompts:
        raise DataError(f"verifiers: {config.id} has no tasks")
    return prompts


def _prompt(task: dict[str, Any], name: str, number: int) -> Prompt:
    asked = task["prompt"] if isinstance(task["prompt"], list) else []
    messages = tuple(
        Message(role=str(m.get("role")), content=_text(m.get("content")))
        for m in asked
        if isinstance(m, dict)
    )
    # A task without a prompt opens its conversation in the environment.
    return Prompt(
        id=f"{name}/{number}",
        messages=messages,
        text=None if messages else f"{name} {number}",
        answer=task["answer"],
        task=name,
        metadata={RUN: task["run"]},
    )


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _key(prompt: Prompt) -> str:
    return content_key(prompt) + json.dumps(prompt.metadata[RUN], sort_keys=True)

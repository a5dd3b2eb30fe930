"""A language model as the judge, over any OpenAI-compatible endpoint (rill's own server among them)."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any, Literal

import httpx
from pydantic import Field, field_validator, model_validator

from rill.envs.per_loop import PerLoop
from rill.envs.rewards.base import Isolation, RewardConfig
from rill.errors import ConfigError, in_words
from rill.types import Prompt, Trajectory

TEMPLATE = """Judge an answer to a question.

Question:
{question}

Reference answer (may be empty):
{reference}

Answer to be judged:
{response}

How good is the answer, from 0 (useless) to 10 (perfect)? Explain in a sentence, then end with a line
"Score: N"."""

RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class JudgeReward:
    class Config(RewardConfig):
        type: Literal["judge"] = "judge"
        url: str
        """Base address of the endpoint, e.g. "http://127.0.0.1:8000/v1"."""
        model: str
        api_key_variable: str = ""
        """Environment variable that holds the key. Empty: none is sent."""
        template: str = TEMPLATE
        """What the judge is asked; {question}, {reference} and {response} are filled in."""
        pattern: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"
        """Finds the score in the judge's words: the last match's first group."""
        lowest: float = 0.0
        highest: float = 10.0
        """The judge's scale; the reward is the score's place on it, from 0 to 1."""
        temperature: float = Field(default=0.0, ge=0)
        max_tokens: int = Field(default=256, ge=1)
        max_response_characters: int = Field(default=20_000, ge=1)
        """A longer answer is judged by its last part."""
        retries: int = Field(default=3, ge=0)
        """Further tries after a broken connection, a busy server, or words without a score."""
        max_concurrent: int | None = Field(default=32, ge=1)

        @field_validator("pattern")
        @classmethod
        def _has_a_group(cls, pattern: str) -> str:
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
            if groups < 1:
                raise ValueError("`pattern` needs a group around the score")
            return pattern

        @field_validator("template")
        @classmethod
        def _shows_the_answer(cls, template: str) -> str:
            if "{response}" not in template:
                raise ValueError("`template` must hold {response}")
            return template

        @model_validator(mode="after")
        def _is_a_scale(self) -> JudgeReward.Config:
            if self.lowest >= self.highest:
                raise ValueError(f"`lowest` ({self.lowest:g}) must lie below `highest` ({self.highest:g})")
            return self

    isolation = Isolation.ASYNC

    def __init__(self, config: Config) -> None:
        self.config = config
        self._pattern = re.compile(config.pattern)
        self._headers = {}
        if config.api_key_variable:
            key = os.environ.get(config.api_key_variable)
            if not key:
                raise ConfigError(f"judge: the environment variable {config.api_key_variable!r} is not set")
            self._headers["Authorization"] = f"Bearer {key}"
        self._client = PerLoop(self._connect)

    async def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        client = self._client()
        body: dict[str, Any] = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": self._question(prompt, response_text)}],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }
        failure = ""
        for attempt in range(self.config.retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 8.0))
            words, failure = await self._ask(client, body)
            if words is not None:
                value = self._parse(words)
                if value is not None:
                    return value
                failure = f"no score in the judge's words: {words[-120:]!r}"
                # The same words again would not help.
                body["temperature"] = max(0.3, self.config.temperature)
        raise RuntimeError(failure)

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str | None, str]:
        """The judge's words, or why there are none. Raises where trying again is of no use."""
        try:
            response = await client.post(f"{self.config.url.rstrip('/')}/chat/completions", json=body)
        except httpx.TransportError as error:
            return None, in_words(error)
        if response.status_code in RETRY_STATUS:
            return None, f"status {response.status_code}"
        response.raise_for_status()
        try:
            return str(response.json()["choices"][0]["message"]["content"] or ""), ""
        except (ValueError, KeyError, IndexError, TypeError):
            return None, f"not a chat completion: {response.text[:120]!r}"

    def _question(self, prompt: Prompt, response_text: str) -> str:
        asked = prompt.text or "\n\n".join(m.content for m in prompt.messages if m.role != "system")
        reference = "" if prompt.answer is None else str(prompt.answer)
        response = response_text[-self.config.max_response_characters :]
        # Filled in one pass: braces, or "{reference}", in a model's answer stay what they are.
        fields = {"question": asked, "reference": reference, "response": response}
        return re.sub(r"\{(question|reference|response)\}", lambda m: fields[m[1]], self.config.template)

    def _parse(self, words: str) -> float | None:
        found = list(self._pattern.finditer(words))
        if not found:
            return None
        place = (float(found[-1][1]) - self.config.lowest) / (self.config.highest - self.config.lowest)
        return min(1.0, max(0.0, place))

    def _connect(self) -> httpx.AsyncClient:
        # No limits of the client's own: the runner has the deadline, and bounds how many ask at once.
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, trust_env=False)

"""A multi-turn environment: the model may ask a calculator before it answers.

    prompt │ "… <calc>27*58</calc>" │ "<result>1566</result>" │ "… <calc>…</calc>" │ … │ answer without a call
             sampled, trained on      observation, mask 0        sampled                  sampled

Token-in, token-out: the result is encoded on its own and appended; what the model wrote is never encoded again. It is
the smallest whole example of a tool environment, and a useful one for small models.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from rill.config import OneOf, PartConfig
from rill.data.base import check_template
from rill.data.chat import PromptEncoder
from rill.envs.base import Policy
from rill.envs.rewards.base import REWARDS
from rill.envs.rewards.runner import RewardRunner, ScoringConfig
from rill.envs.trajectory_builder import TrajectoryBuilder
from rill.types import Prompt, SamplingParams, StopReason, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<calc>", "</calc>"
MAX_CHARACTERS, MAX_BITS = 256, 4_096


class Calculator:
    class Config(PartConfig):
        type: Literal["calculator"] = "calculator"
        reward: Annotated[PartConfig, OneOf(REWARDS)] = Field(
            default={"type": "exact"}, validate_default=True
        )
        """How the last turn is scored."""
        scoring: ScoringConfig = ScoringConfig()
        max_calls: int = Field(default=4, ge=1)
        """Calls of one episode; a further one ends it."""
        max_tokens: int = Field(default=0, ge=0)
        """Longest episode in tokens, prompt included. 0: only each turn is limited, by the sampling settings."""
        result_template: str = "<result>{result}</result>"
        """How a result is shown to the model."""
        template_arguments: dict[str, Any] = {}
        """Passed to the chat template. Empty: none."""

        @field_validator("result_template")
        @classmethod
        def _shows_the_result(cls, template: str) -> str:
            check_template("result_template", template, ("result",), ("result",))
            return template

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.encoder = PromptEncoder(tokenizer, template_arguments=config.template_arguments)
        self.rewards = RewardRunner(config.reward, config.scoring)

    async def rollout(
        self, prompt: Prompt, policy: Policy, *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        token_ids = self.encoder.encode(prompt)
        episode = TrajectoryBuilder(prompt, token_ids, trajectory_id=trajectory_id, group_id=group_id)
        sampling = replace(sampling, stop=(*sampling.stop, CLOSE))
        stop_reason, num_calls = StopReason.ENV_DONE, 0
        while True:
            completion = await policy.generate(episode.token_ids, self._within_limit(sampling, episode))
            text = self.encoder.decode(completion.token_ids)
            episode.add_sampled(completion, text)
            call = find_call(text)
            if call is None:
                if completion.stop_reason in (StopReason.LENGTH, StopReason.ABORTED):
                    stop_reason = completion.stop_reason
                break
            if num_calls == self.config.max_calls:
                break
            num_calls += 1
            result = evaluate(call)
            shown = self.config.result_template.format(result=result)
            observation = self.encoder.encode_text(shown, special=False)
            if not self._has_room(episode, len(observation)):
                stop_reason = StopReason.LENGTH
                break
            episode.add_observation(np.asarray(observation), result, tool="calculator", expression=call)
        trajectory = episode.finish(stop_reason, metadata={"num_tool_calls": num_calls})
        return await self.rewards.score(prompt, trajectory)

    def close(self) -> None:
        self.rewards.close()

    def _within_limit(self, sampling: SamplingParams, episode: TrajectoryBuilder) -> SamplingParams:
        if not self.config.max_tokens:
            return sampling
        left = max(1, self.config.max_tokens - episode.num_tokens)
        return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, left))

    def _has_room(self, episode: TrajectoryBuilder, num_more: int) -> bool:
        return not self.config.max_tokens or episode.num_tokens + num_more < self.config.max_tokens


def find_call(text: str) -> str | None:
    """The expression of a call that the text ends with."""
    _, mark, tail = text.rpartition(OPEN)
    inside = tail.rstrip()
    return inside.removesuffix(CLOSE) if mark and inside.endswith(CLOSE) else None


def evaluate(expression: str) -> str:
    """The value as text, or "error: …". Numbers and + - * / // % ** ( ) only; sizes are bounded."""
    if len(expression) > MAX_CHARACTERS:
        return f"error: longer than {MAX_CHARACTERS} characters"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        return f"error: {error}"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            over, under = _value(left), _value(right)
            whole = isinstance(over, int) and isinstance(under, int) and under != 0 and over % under == 0
            return over // under if whole else over / under
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError("only numbers and + - * / // % ** ( ) are understood")


def _power(base: int | float, exponent: int | float) -> int | float:
    if abs(exponent) > MAX_BITS or (isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS):
        raise ValueError("the power is too large")
    value: Any = base**exponent
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    return _bounded(value)


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    assert isinstance(value, int | float)
    return value

"""A tool in plain text: the model may ask a calculator before it answers.

    prompt │ "… <calc>27*58</calc>" │ "<result>1566</result>" │ "… <calc>…</calc>" │ … │ answer without a call
             sampled, trained on      observation, mask 0        sampled                  sampled

For models that know no tool-call format; those that do are served by `agent.act` (see docs/agents.md).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rill.config import OneOf, PartConfig
from rill.data.base import check_template
from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.rewards.base import REWARDS
from rill.types import Prompt

OPEN, CLOSE = "<calc>", "</calc>"
MAX_CHARACTERS, MAX_BITS = 256, 4_096


class Calculator(Environment):
    class Config(Environment.Config):
        type: Literal["calculator"] = "calculator"
        reward: Annotated[PartConfig, OneOf(REWARDS)] = Field(
            default={"type": "exact"}, validate_default=True
        )
        """How the last turn is scored."""
        max_calls: int = Field(default=4, ge=1)
        """Calls of one episode; a further one ends it."""
        result_template: str = "<result>{result}</result>"
        """How a result is shown to the model."""

        @field_validator("result_template")
        @classmethod
        def _shows_the_result(cls, template: str) -> str:
            check_template("result_template", template, ("result",), ("result",))
            return template

    config: Config

    async def run(self, task: Prompt, agents: Agents) -> None:
        reply = await agents.policy.generate(task, stop=(CLOSE,))
        for _ in range(self.config.max_calls):
            if (expression := find_call(reply.text)) is None:
                return
            result = await reply.call(calculate, expression=expression)
            context = reply.then(self.config.result_template.format(result=result))
            reply = await agents.policy.generate(context, stop=(CLOSE,))


async def calculate(expression: str) -> str:
    """The value of an arithmetic expression."""
    return evaluate(expression)


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

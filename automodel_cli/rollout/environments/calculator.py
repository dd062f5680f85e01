"""Calculator tool. Torch-free, without `eval`: only listed operations are computed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice
from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.types import Message

_MAX_LENGTH, _MAX_BITS = 200, 4096
_CHARACTERS = re.compile(r"[0-9.+\-*/%() ]+")


@dataclass(frozen=True, kw_only=True)
class Calculator(Environment):
    """Compute the arithmetic in messages of the model. A message without a request is the answer and ends the episode.

    `pattern` is a regular expression. The first group of its first match is the arithmetic: numbers, `+ - * / // % **`
    and parentheses. The result, or `error: ...`, is returned as a message of `role`. Each call with a number gets
    `tool_call_reward`, each other call `error_reward`. Rewards score the last message.
    """

    pattern: str = r"<calc>(.*?)</calc>"
    """Regular expression whose first group is the arithmetic to compute."""
    role: Literal["tool", "user"] = "tool"
    """Role of the message with the result."""
    tool_call_reward: float = 0.0
    """Reward of each call with a numeric result."""
    error_reward: float = 0.0
    """Reward per failed call."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(
                f"pattern={self.pattern!r} is not a regular expression: {error}",
                code="invalid_value",
                keys=("pattern",),
            ) from error
        if groups < 1:
            raise ConfigError(
                f"pattern={self.pattern!r} must contain a group for the arithmetic",
                code="invalid_value",
                keys=("pattern",),
                fix="pattern='calc: (.+)'",
            )
        check_choice("role", self.role, ("tool", "user"), fix="role=tool")

    def step(self, messages: Sequence[Message], row: Mapping[str, object], state: object) -> Turn:
        """See `Environment.step`."""
        request = re.search(self.pattern, str(messages[-1]["content"]))
        if request is None:
            return Turn()
        try:
            reply, reward = calculate(request[1]), self.tool_call_reward
        except ValueError as error:
            reply, reward = f"error: {error}", self.error_reward
        return Turn(({"role": self.role, "content": reply},), reward, done=False)


def calculate(text: str) -> str:
    """Return the value of an arithmetic expression, computed exactly. Fractions have 12 significant digits. Raises
    ValueError for other syntax, division by zero, and numbers beyond 4096 bits."""
    text = text.strip()
    if len(text) > _MAX_LENGTH or not _CHARACTERS.fullmatch(text):
        raise ValueError("no arithmetic")
    try:
        value = _value(ast.parse(text, mode="eval").body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:  # a fraction with more digits than a float holds
        raise ValueError("too large") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no arithmetic") from error


_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            value = Fraction(str(number))
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            value = _value(inner)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = -_value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            value = Fraction(_BINARY[type(sign)](_value(left), _value(right)))
        case _:
            raise ValueError("no arithmetic")
    if _bits(value) > _MAX_BITS:
        raise ValueError("too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent must be a whole number")
    if abs(exponent.numerator) * _bits(base) > _MAX_BITS:
        raise ValueError("too large")
    return Fraction(base**exponent.numerator)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())

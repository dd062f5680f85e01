"""Mathematical equivalence with `math-verify` (extra `rewards`). Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from automodel_cli.config.value_checks import require_package
from automodel_cli.rollout.rewards.base import Reward, RewardInput
from automodel_cli.rollout.rewards.safe_eval import guard_sympy
from automodel_cli.rollout.rewards.text import check_pattern


@dataclass(frozen=True, kw_only=True)
class MathEquivalence(Reward):
    """1 if the final answer of the completion is mathematically equal to the row's answer (`1/2`, `0.5`,
    `\frac{1}{2}`), else 0.

    The row's answer is LaTeX or a plain expression. If the column contains a complete solution, `answer_pattern` is a
    regular expression: the first group of its last match is the answer (`#### (.+)`). Decimal numbers are compared to
    `float_digits`. Runs in a worker process, because computer algebra may not terminate.
    """

    confined: ClassVar[bool] = True

    column: str = "answer"
    """Column with the answer, as LaTeX or a plain expression."""
    answer_pattern: str | None = None
    """Regular expression for the answer within the column: the first group of its last match (`#### (.+)`)."""
    float_digits: int = 6
    """Number of compared decimal digits."""
    require_eos: bool = True
    """Score a truncated completion as wrong."""
    timeout: float | None = 10.0
    """Seconds for one comparison of expressions. null: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.answer_pattern is not None:
            check_pattern("answer_pattern", self.answer_pattern, groups=1)

    def check(self) -> None:
        require_package("math_verify", "MathEquivalence", install="'automodel-cli[rewards]'", keys=("rewards",))

    def warm_up(self) -> None:
        import math_verify  # noqa: F401

        guard_sympy()

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def score(self, sample: RewardInput) -> float:
        if self.require_eos and not sample.finished:
            return 0.0
        self.warm_up()
        from math_verify import parse, verify

        # The time limits of math-verify use signals, which need the main thread. The worker process is killed instead.
        gold = parse(f"\\boxed{{{self._answer(sample)}}}", parsing_timeout=None, raise_on_error=True)
        response = parse(sample.completion, parsing_timeout=None, raise_on_error=True)
        if not gold:
            raise ValueError(f"the answer {sample.column(self.column)!r} cannot be read as mathematics")
        return float(
            verify(gold, response, float_rounding=self.float_digits, timeout_seconds=None, raise_on_error=True)
        )

    def _answer(self, sample: RewardInput) -> str:
        text = str(sample.column(self.column))
        if self.answer_pattern is None:
            return text
        matches = list(re.finditer(self.answer_pattern, text))
        if not matches:
            raise ValueError(f"answer_pattern={self.answer_pattern!r} is not in the answer {text[-60:]!r}")
        return matches[-1].group(1).strip()

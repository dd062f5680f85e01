"""Mathematical equivalence by `math-verify` (extra `rewards`). Torch-free."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.base import Judged, Reward


@dataclass(frozen=True, kw_only=True)
class MathEquivalence(Reward):
    """1 when the completion's final answer equals the row's as mathematics (`1/2` is `0.5` is `\\frac{1}{2}`), else 0.

    The row's answer may be LaTeX or a plain expression. `float_digits` are compared of decimal numbers. Runs in a
    helper process: computer algebra can take forever.
    """

    column: str = "answer"
    float_digits: int = 6
    must_finish: bool = True
    timeout: float | None = 10.0

    def check(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "MathEquivalence needs the package math-verify",
                fix="pip install 'automodel-cli[rewards]'",
            )

    def warm_up(self) -> None:
        import math_verify  # noqa: F401

    def score(self, sample: Judged) -> float:
        if self.must_finish and not sample.finished:
            return 0.0
        from math_verify import parse, verify

        # Its own time limits use signals, which only the main thread may set; ours kills the helper process.
        gold = parse(f"\\boxed{{{sample.column(self.column)}}}", parsing_timeout=None, raise_on_error=True)
        said = parse(sample.completion, parsing_timeout=None, raise_on_error=True)
        if not gold:
            raise ValueError(f"the answer {sample.column(self.column)!r} cannot be read as mathematics")
        return float(verify(gold, said, float_rounding=self.float_digits, timeout_seconds=None, raise_on_error=True))

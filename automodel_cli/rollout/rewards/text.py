"""Rewards of text: exact answer, format, length, custom function. Torch-free."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.base import Reward, RewardInput


@dataclass(frozen=True, kw_only=True)
class ExactAnswer(Reward):
    """1 if the completion, or the part that `pattern` captures, is the row's answer. Else 0.

    `column` is the column with the answer. `pattern` is a regular expression for answers within longer text: the first
    group of its last match is compared, for example `#### (.+)`. Surrounding white space is ignored, and case with
    `ignore_case`. With `require_eos`, a truncated completion is wrong.
    """

    column: str = "answer"
    """Column with the expected answer."""
    pattern: str | None = None
    """Regular expression for the answer of the completion: the first group of its last match. null: the complete text.
    """
    ignore_case: bool = False
    """Ignore case."""
    require_eos: bool = True
    """Score a truncated completion as wrong."""
    timeout: float | None = None
    """Time limit in seconds for one comparison, because a regular expression may be slow. null: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pattern is not None:
            check_pattern("pattern", self.pattern, groups=1)
            if self.timeout is None:
                object.__setattr__(self, "timeout", 5.0)  # a pattern may backtrack without end

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def score(self, sample: RewardInput) -> float:
        if self.require_eos and not sample.finished:
            return 0.0
        said: str = sample.completion
        if self.pattern is not None:
            found = list(re.finditer(self.pattern, said))
            if not found:
                return 0.0
            said = found[-1].group(1)
        said, answer = said.strip(), str(sample.column(self.column)).strip()
        return float(said.casefold() == answer.casefold() if self.ignore_case else said == answer)


@dataclass(frozen=True, kw_only=True)
class FormatRegex(Reward):
    """1 if the complete completion matches `pattern` (without surrounding white space), else 0. A dot matches
    newlines."""

    confined: ClassVar[bool] = True

    pattern: str
    """Regular expression that the complete completion must match."""
    timeout: float | None = 5.0
    """Time limit in seconds for one match, because a regular expression may be slow. null: no limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern("pattern", self.pattern)

    def score(self, sample: RewardInput) -> float:
        return float(re.fullmatch(self.pattern, sample.completion.strip(), re.DOTALL) is not None)


@dataclass(frozen=True, kw_only=True)
class Length(Reward):
    """0 up to `soft_limit` tokens, then linearly down to -1 at `max_tokens`.

    Linear in between, as the soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13).
    """

    soft_limit: int
    """Tokens without a deduction."""
    max_tokens: int
    """Tokens at which the score reaches -1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.soft_limit < self.max_tokens:
            raise ConfigError(
                f"soft_limit={self.soft_limit} must be at least 0 and below max_tokens={self.max_tokens}",
                code="out_of_range",
                keys=("soft_limit", "max_tokens"),
                fix=f"soft_limit={max(0, self.max_tokens * 3 // 4)}",
            )

    def score(self, sample: RewardInput) -> float:
        beyond = (sample.num_tokens - self.soft_limit) / (self.max_tokens - self.soft_limit)
        return -min(max(beyond, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class FunctionReward(Reward):
    """Custom function that returns a number or a bool, or None if it does not apply to the row.

    In YAML: `function: {_target_: my_package.rewards.brevity, _partial_: true}`. The first parameter is the
    completion. A parameter `row` receives the complete row, others the columns of their names (`def right(completion,
    answer)`), and `**rest` all other columns. Columns of parameters with a default are optional. With a `timeout` it
    runs in a worker process, which must be able to import it.
    """

    function: Callable[..., float | None]
    """Your function, which returns a number, a bool, or None if it does not apply to the row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parameters = [p.name for p in inspect.signature(self.function).parameters.values() if p.kind not in _VARIADIC]
        inner = getattr(self.function, "func", self.function)  # of a partial
        name = getattr(inner, "__name__", type(inner).__name__)
        if not parameters or "completions" in parameters:  # TRL calls `prompts, completions` too
            takes = "`completions`, a list" if parameters else "no completion"
            raise ConfigError(
                f"function {name} accepts {takes}, but a reward is called with one completion",
                code="invalid_value",
                keys=("function",),
                fix=f"def {name}(completion, row): ...   (several at a time: a subclass of BatchReward)",
            )
        if "completion" in parameters[1:]:
            raise ConfigError(
                f"function {name} must call its first parameter completion: `{parameters[0]}` receives "
                "the completion, and `completion` a column of the row",
                code="invalid_value",
                keys=("function",),
                fix=f"def {name}(completion, {parameters[0]}): ...",
            )
        if inspect.iscoroutinefunction(self.function):
            raise ConfigError(
                f"function {name} is async, which is not supported: it would score one sample after the other",
                code="not_supported",
                keys=("function",),
                fix="a subclass of Reward with `async def score(self, sample)`",
            )

    @property
    def columns(self) -> tuple[str, ...]:
        required = [
            p.name
            for p in self._requested_parameters()
            if p.kind not in _VARIADIC and p.default is inspect.Parameter.empty
        ]
        return tuple(name for name in required if name != "row")

    def score(self, sample: RewardInput) -> float | None:
        asked = {p.name: p for p in self._requested_parameters()}
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in asked.values()):
            given = {name: value for name, value in sample.row.items() if name not in self._settled()}
        else:
            given = {name: value for name, value in sample.row.items() if name in asked}
        if "row" in asked:
            given["row"] = sample.row
        return self.function(sample.completion, **given)

    def _settled(self) -> set[str]:
        """Parameters that the config or the completion fill."""
        first = next(iter(inspect.signature(self.function).parameters))
        return {first, *getattr(self.function, "keywords", {})}

    def _requested_parameters(self) -> list[inspect.Parameter]:
        settled = self._settled()
        return [p for name, p in inspect.signature(self.function).parameters.items() if name not in settled]


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_pattern(key: str, pattern: str, *, groups: int = 0) -> None:
    """Raise ConfigError for an invalid regular expression, or one with fewer groups."""
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(
            f"{key}={pattern!r} is not a regular expression: {error}", code="invalid_value", keys=(key,)
        ) from error
    if num_groups < groups:
        raise ConfigError(
            f"{key}={pattern!r} must contain a group ( ) that matches the answer",
            code="invalid_value",
            keys=(key,),
            fix=f"{key}='({pattern})'",
        )

"""Reward of generated code: run the tests of the row in a sandbox. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.base import Reward, RewardInput
from automodel_cli.rollout.rewards.sandbox.host import Limits, check_memory, require_isolation, run_python, run_test

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class CodeExecution(Reward):
    """Share of the row's tests that the generated code passes, 0 to 1. With `all_or_nothing` 0 or 1.

    - The code is the last ``` block of the completion, or the complete text if it has none.
    - `column` contains a test or a list of tests. A test is Python that raises on failure (`assert add(1, 2) == 3`),
      or `{stdin, stdout}` for the output of a script.
    - Each test runs the code in a new process with `timeout` seconds and `memory_mib`, without network, processes or
      files of the machine. The test runs in a second process. Only arguments and results are exchanged, so the code
      never sees a test.
    - Names that the test does not define come from the code. Python functions such as `sum` keep their meaning, unless
      the column `entry_point` of the row names them.
    - If the machine cannot isolate code, the run stops, unless `allow_unisolated` is set.
    """

    limits_itself: ClassVar[bool] = True

    column: str = "tests"
    """Column with the tests: Python that raises (`assert add(1, 2) == 3`), or `{stdin, stdout}`."""
    entry_point: str = "entry_point"
    """Column with the name of the function under test."""
    all_or_nothing: bool = False
    """Score 1 if all tests pass, otherwise 0. false: the fraction of passed tests."""
    memory_mib: int = 512
    """Memory limit of each test in MiB."""
    allow_unisolated: bool = False
    """Run the code even if the machine cannot isolate it."""
    timeout: float | None = 5.0
    """Seconds for each test."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout is None:
            raise ConfigError(
                "timeout=null is not supported, because generated code may never end",
                code="empty_value",
                keys=("timeout",),
                fix="timeout=5",
            )
        check_memory(self.memory_mib)

    def check(self) -> None:
        require_isolation(allow=self.allow_unisolated)

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def score(self, sample: RewardInput) -> float:
        tests = sample.column(self.column)
        tests = [tests] if isinstance(tests, str | dict) else list(tests)
        if not tests:
            raise ValueError(f"column {self.column!r} has no test")
        blocks = code_blocks(sample.completion)
        share = self._share(blocks[-1] if blocks else sample.completion, tests, sample.row.get(self.entry_point))
        return float(share == 1) if self.all_or_nothing else share

    def _share(self, code: str, tests: Sequence[str | dict[str, object]], entry_point: str | None) -> float:
        assert self.timeout is not None
        limits = Limits(self.timeout, self.memory_mib * 2**20)
        return sum(_passes(code, test, limits, entry_point) for test in tests) / len(tests)


def code_blocks(text: str) -> list[str]:
    """The programs between ``` lines of a text."""
    return _BLOCK.findall(text)


def _passes(code: str, test: str | dict[str, Any], limits: Limits, entry_point: str | None) -> bool:
    if isinstance(test, dict):
        outcome = run_python(code, test.get("stdin", ""), limits)
        return outcome.returncode == 0 and outcome.stdout.split() == str(test["stdout"]).split()
    return run_test(code, test, limits, entry_point).passed

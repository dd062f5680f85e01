"""Labels of rows as targets of a classifier. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from automodel_cli.data.formats.base import DataKind
from automodel_cli.data.row_errors import RowError, is_finite_number

Problem = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class LabelSpec:
    """How the labels of rows are read: the problem, the names of the outputs, and whether each token has a label.

    | problem | value of a row | target |
    |---|---|---|
    | `single_label_classification` | a name or an index | index of the class |
    | `multi_label_classification` | a list of names or indices, or `{name: true}` | 1.0 for each label, else 0.0 |
    | `regression` | a number, or a list of one per output | the numbers |

    An integer is an index unless it is one of the names.
    """

    problem: Problem
    names: tuple[str, ...]
    of_tokens: bool = False

    kind: ClassVar[DataKind] = "labeled"

    @property
    def is_class(self) -> bool:
        """Whether a target is the index of a class."""
        return self.problem == "single_label_classification"

    def target(self, value: object, column: str) -> tuple[float, ...]:
        """Return the target of a label. Raises RowError with the value and the allowed ones."""
        if self.problem == "regression":
            return self._numbers(value, column)
        if self.is_class:
            return (float(self.index(value, column)),)
        return self._several(value, column)

    def index(self, value: object, column: str) -> int:
        """Return the output that a name or an index stands for."""
        if str(value) in self.names:
            return self.names.index(str(value))
        if isinstance(value, int):
            value = int(value)  # also of true and false
            if 0 <= value < len(self.names):
                return value
            raise RowError(
                "label_out_of_range",
                f"{column} is {value}, but objective.labels has {len(self.names)} names, so indices are 0 to "
                f"{len(self.names) - 1}",
                fix="objective.labels=<names of all classes>",
            )
        near = difflib.get_close_matches(str(value), self.names, 1, 0.6)
        known = ", ".join(self.names[:10]) + (", ..." if len(self.names) > 10 else "")
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RowError(
            "unknown_label",
            f"{column} is {value!r}, which is not in objective.labels; {hint}labels: {known}",
            fix="correct the label, or add it to objective.labels",
        )

    def _several(self, value: object, column: str) -> tuple[float, ...]:
        if isinstance(value, dict):
            value = [name for name, holds in value.items() if holds]
        if not isinstance(value, list | tuple):
            raise RowError("bad_label", f"{column} is {value!r}, but must be a list of labels")
        if len(value) == len(self.names) and all(isinstance(item, bool | float) for item in value):
            value = [i for i, holds in enumerate(value) if holds]
        found = [self.index(item, column) for item in value]
        if len(set(found)) < len(found):
            raise RowError(
                "bad_label",
                f"{column} is {value!r:.80}, which names a label twice; write names, or true and false for each label",
            )
        return tuple(float(i in found) for i in range(len(self.names)))

    def _numbers(self, value: Any, column: str) -> tuple[float, ...]:
        values: Sequence[float] = value if isinstance(value, list | tuple) else [value]
        if not all(map(is_finite_number, values)):
            raise RowError("bad_label", f"{column} is {value!r:.80}, but must be a finite number")
        if len(values) != len(self.names):
            raise RowError(
                "bad_label", f"{column} has {len(values)} numbers, but objective.labels has {len(self.names)} names"
            )
        return tuple(float(v) for v in values)

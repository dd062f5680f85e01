"""Output of a comparison: one line per case, a verdict, and JSON. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from automodel_cli.parity.cases import ULPS_OF_GRADIENTS, ULPS_OF_SUMS, Case

Verdict = Literal["ok", "WRONG", "refused", "FAILED"]
_COLUMNS = ("ranks", "loss", "grad norm", "gradient", "seconds", "verdict")
_WIDTHS = (5, 9, 9, 9, 7, 7)


@dataclass(frozen=True)
class Result:
    """Result of one case. The three differences are relative. `name` is the parameter with the worst gradient. A case
    that was rejected or failed has a `reason` and no differences.
    """

    row: Case
    verdict: Verdict
    seconds: float
    loss: float | None = None
    grad_norm: float | None = None
    gradient: float | None = None
    name: str = ""
    reason: str = ""

    @property
    def differences(self) -> tuple[float | None, float | None, float | None]:
        return self.loss, self.grad_norm, self.gradient


def header(rows: Sequence[Case]) -> str:
    cells = [f"{name:>{width}}" for name, width in zip(_COLUMNS, _WIDTHS, strict=True)]
    return "  ".join([f"{'layout':<{_width(rows)}}", "rows  ", *cells, "worst gradient"])


def line(result: Result, rows: Sequence[Case]) -> str:
    """`rows` are all cases of the table, which determine the width of the first column."""
    row, shown = result.row, [_show(value) for value in result.differences]
    cells = [str(row.world_size), *shown, f"{result.seconds:.1f}", result.verdict]
    text = "  ".join(
        [
            f"{row.layout:<{_width(rows)}}",
            row.rows,
            *(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)),
            result.name,
        ]
    )
    lines = [text.rstrip(), *(f"    {line}" for line in result.reason.splitlines())]
    return "\n".join(lines)


def parity_summary(results: Sequence[Result], tolerance: float, *, passed: bool) -> str:
    good = [result for result in results if result.verdict == "ok"]
    if passed:
        exact = [result for result in good if result.row.is_exact]
        worst = max(exact or good, key=_largest)
        refused = len(results) - len(good)
        more = f", {refused} refused that this recipe does not use" if refused else ""
        text = (
            f"verified: {len(good)} rows give one process's numbers{more}; "
            f"worst {_largest(worst):.1e} ({worst.row}), tolerance {tolerance:.0e}"
        )
        return "\n".join([text, *(_in_bounds_units(result) for result in good if not result.row.is_exact)])
    bad = len(results) - len(good)
    return f"NOT verified: {bad} of {len(results)} rows do not give one process's numbers within {tolerance:.0e}"


def _in_bounds_units(result: Result) -> str:
    """Format a case in a lower precision, in multiples of its bounds."""
    assert result.loss is not None and result.grad_norm is not None and result.gradient is not None
    ulp = result.row.ulp
    if result.row.fp8 is not None:
        sums, gradients = result.row.bounds(0.0)
        return (
            f"{result.row}: loss and norm within {max(result.loss, result.grad_norm):.1%} of {sums:.1%}, gradients "
            f"within {result.gradient:.0%} of {gradients:.0%} of the largest"
        )
    return (
        f"{result.row}: loss and norm within {max(result.loss, result.grad_norm) / ulp:.1f} of {ULPS_OF_SUMS} units in "
        f"the last place, gradients within {result.gradient / ulp:.1f} of {ULPS_OF_GRADIENTS}"
    )


def as_json(results: Sequence[Result], tolerance: float, *, passed: bool, **more: Any) -> dict[str, object]:
    """Return JSON. Non-finite differences (a missing gradient) are null; the verdict mentions them."""
    rows = [
        {
            "layout": result.row.layout,
            "rows": result.row.rows,
            "ranks": result.row.world_size,
            "verdict": result.verdict,
            "loss": _finite(result.loss),
            "grad_norm": _finite(result.grad_norm),
            "gradient": _finite(result.gradient),
            "parameter": result.name or None,
            "seconds": round(result.seconds, 2),
            "reason": result.reason or None,
        }
        for result in results
    ]
    return {"verified": passed, "tolerance": tolerance, **more, "table": rows}


def _width(rows: Sequence[Case]) -> int:
    return max(len(row.layout) for row in rows)


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _largest(result: Result) -> float:
    return max(value for value in result.differences if value is not None)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

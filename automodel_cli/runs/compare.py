"""Compare two runs: config, data, code, environment and the first step with different losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from automodel_cli.config.composition.yaml_marks import read_marks
from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.dotted_keys import values_by_key
from automodel_cli.runs.index import RunEntry

NOTHING = "-"


@dataclass(frozen=True)
class Difference:
    """One difference. `NOTHING` if one of the two has no value."""

    where: str
    """config, data, code or environment."""
    name: str
    first: str
    second: str


@dataclass(frozen=True)
class Parting:
    """First difference of a column of two runs. Steps are None without a difference."""

    column: str
    num_steps: int
    """Steps that both have recorded."""
    unequal: int | None
    """The first step whose values are not the same number."""
    apart: int | None
    """The first step whose values differ by more than the tolerance."""
    at_end: tuple[float, float]
    """At the last step that both have."""


def differences(first: RunEntry, second: RunEntry) -> list[Difference]:
    """Everything that differs, in the order config, data, code, environment."""
    found = list(_of("config", *(config_with_origins(run.folder / "config.yaml") for run in (first, second))))
    found += _of("data", *(_data(run) for run in (first, second)))
    for part in ("code", "environment"):
        found += _of(part, *(_last_attempt(run).get(part, {}) for run in (first, second)))
    return found


def config_with_origins(path: Path) -> dict[str, str]:
    """Return key -> `value  (origin)` of a run's `config.yaml`. Values that differ only in origin are equal."""
    marks = read_marks(path)  # raises for an invalid config, with the line
    config = dict(values_by_key(OmegaConf.to_container(OmegaConf.load(path), resolve=False)))
    lines = path.read_text(encoding="utf-8").splitlines()
    values = {}
    for mark in marks:
        value = config.get(mark.key)
        if isinstance(value, dict) and value:
            continue
        origin = lines[mark.line - 1].rpartition("  # ")[2] if "  # " in lines[mark.line - 1] else ""
        values[mark.key] = f"{format_value(value, 60)}\n{origin}"
    return {key: text for key, text in values.items() if not _is_inside_a_list(key, values)}


def _is_inside_a_list(key: str, keys: Mapping[str, str]) -> bool:
    parent = key.rpartition(".")[0]
    return bool(parent) and (parent in keys or _is_inside_a_list(parent, keys))


def _of(where: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Difference]:
    for name in dict.fromkeys((*first, *second)):
        texts = first.get(name, NOTHING), second.get(name, NOTHING)
        if texts[0].partition("\n")[0] != texts[1].partition("\n")[0]:
            yield Difference(where, name, *texts)


def _data(run: RunEntry) -> dict[str, str]:
    contents = run.record.get("data", {}).get("contents", [])
    return {f"dataset {index}": f"{content[:12]}\n{name}" for index, (name, content) in enumerate(contents)}


def _last_attempt(run: RunEntry) -> dict[str, Any]:
    return run.attempts[-1] if run.attempts else {}


def parting(first: RunEntry, second: RunEntry, column: str, tolerance: float) -> Parting | None:
    """Return where `column` of the two runs differs by more than `tolerance` (relative). None if they have no common
    step."""
    a, b = _column(first, column), _column(second, column)
    common = sorted(a.keys() & b.keys())
    if not common:
        return None
    unequal = next((step for step in common if a[step] != b[step]), None)
    apart = next((s for s in common if abs(a[s] - b[s]) > tolerance * max(abs(a[s]), abs(b[s]))), None)
    return Parting(column, len(common), unequal, apart, (a[common[-1]], b[common[-1]]))


def _column(run: RunEntry, column: str) -> dict[int, float]:
    return {row["step"]: row[column] for row in run.rows if isinstance(row.get(column), (int, float))}

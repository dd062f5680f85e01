"""Report of an evaluation: scores with intervals, paired differences, and a JSON file. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.safe_files import replace
from automodel_cli.evaluation.example_answers import example_lines
from automodel_cli.evaluation.scores import (
    TaskScores,
    interval,
    known_of,
    num_questions_text,
    paired_difference,
    text_of,
)
from automodel_cli.runs.report_page import FILE, write_own_page
from automodel_cli.runs.run_record import code_version

Found = dict[str, dict[str, TaskScores]]
"""Outcomes by the model's label and the task's name."""


def report_results(found: Found, run_dir: Path, out: Path, config_yaml: str, num_resamples: int) -> None:
    """Print the scores of every model, compare the first one with the others, print a few answers, and write all to
    `out`.

    Updates the page of the run if `out` is among its evaluations.
    """
    scores = list(_scores(found, num_resamples))
    _write(out, scores, found, config_yaml)
    _print_scores(scores)
    for name in next(iter(found.values())):
        print("\n".join(example_lines(name, {label: tasks[name] for label, tasks in found.items()})))
    print(f"written to {out}")
    if (run_dir / FILE).exists() and out.parent == run_dir / "eval":
        write_own_page(run_dir)


def _scores(found: Found, num_resamples: int) -> Iterator[dict[str, str]]:
    """Return a line per task, measure and model, then for each other model the paired difference to the first."""
    first, *others = found
    for name in found[first]:
        for measure in found[first][name].measures:
            if all(found[label][name].says_nothing_more(measure) for label in found):
                continue
            for label in found:
                values = found[label][name].measures[measure]
                low, high = interval(known_of(values), num_resamples)
                text = text_of(measure)
                yield {
                    "task": f"{name}: {measure}",
                    "model": label,
                    "score": text(found[label][name].means[measure]),
                    "interval": f"{text(low)} to {text(high)}",
                    "note": num_questions_text(values),
                }
            for label in others:
                yield _compared(num_resamples, name, measure, found[first][name], found[label][name], first, label)


def _compared(
    num_resamples: int, name: str, measure: str, ours: TaskScores, theirs: TaskScores, first: str, label: str
) -> dict[str, str]:
    a, b = ours.measures[measure], theirs.measures[measure]
    if len(a) != len(b):
        raise ConfigError(
            f"task {name} has {len(a)} and {len(b)} questions, so the answers cannot be paired",
            code="nothing_to_compare",
        )
    mean, (low, high) = paired_difference(a, b, num_resamples)
    text = text_of(measure, signed=True)
    verdict = "better" if low > 0 else "worse" if high < 0 else "no difference is sure"
    return {
        "task": f"{name}: {measure}",
        "model": f"{first} minus {label}",
        "score": text(mean),
        "interval": f"{text(low)} to {text(high)}",
        "note": f"paired: {verdict}",
    }


def _write(out: Path, scores: list[dict[str, str]], found: Found, config_yaml: str) -> None:
    """Write the results of one evaluation atomically, with values at full precision and one entry per question."""
    content = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "code": code_version(),
        "interval": "95%: Wilson for proportions, Newcombe for their paired differences, else bootstrap over questions",
        "scores": scores,
        "models": {
            label: {name: {"measures": o.measures, "items": o.items} for name, o in tasks.items()}
            for label, tasks in found.items()
        },
        "config": config_yaml,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    replace(out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _print_scores(scores: list[dict[str, str]]) -> None:
    columns = ("task", "model", "score", "interval", "note")
    widths = {column: max(len(column), *(len(line[column]) for line in scores)) for column in columns}
    for line in ({column: column for column in columns}, *scores):
        print("  ".join(line[column].ljust(widths[column]) for column in columns).rstrip())
    print()

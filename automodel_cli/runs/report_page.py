"""Build the HTML report of one or several runs from their folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from automodel_cli.config.security.safe_files import replace
from automodel_cli.report.html_page import page_html
from automodel_cli.report.loss_curve import loss_curve_svg
from automodel_cli.report.shown_run import Dataset, ShownRun, ShownSample, TaskScore
from automodel_cli.runs import rollouts
from automodel_cli.runs.compare import NOTHING, config_with_origins
from automodel_cli.runs.index import RunEntry

FILE, CURVE, SCHEDULE = "report.html", "loss.svg", "schedule.svg"
_PLACES = ("run_name", "output_dir")
_MOST_DIFFERENCES = 40
_MOST_ROLLOUTS, _NEWEST_ROLLOUTS = 8, 512


def write_page(runs: Sequence[RunEntry], path: Path, *, state: str | None = None) -> Path:
    """Write the page of one or several runs to `path` atomically. `state`: state of a run that is just ending."""
    shown = [shown_run(run, state) for run in runs]
    replace(path, page_html(shown, _differences(runs)))
    return path


def write_own_page(folder: Path, *, state: str | None = None) -> Path:
    """Write `report.html` and `loss.svg` of a run to its folder. Returns the path of the page."""
    run = RunEntry(folder)
    replace(folder / CURVE, loss_curve_svg(run.rows, title=run.name))
    return write_page([run], folder / FILE, state=state)


def shown_run(run: RunEntry, state: str | None = None) -> ShownRun:
    """Return the page content of a run."""
    record = run.record
    last = run.attempts[-1] if run.attempts else {}
    schedule = run.folder / SCHEDULE
    config = run.folder / "config.yaml"
    code = {f"code {name}": text for name, text in last.get("code", {}).items()}
    return ShownRun(
        name=run.name,
        rows=run.rows,
        numbers={"state": state or run.state, **_numbers(run)},
        state=state or run.state,
        why="" if state else run.why,
        command=record.get("command", ""),
        about=record.get("about", {}),
        environment={**last.get("environment", {}), **code},
        config_yaml=config.read_text(encoding="utf-8") if config.exists() else "",
        samples=[ShownSample(**sample) for sample in record.get("samples", [])] or _rollouts(run),
        data=[Dataset(**dataset) for dataset in record.get("data", {}).get("statistics", [])],
        layout=record.get("layout", {}),
        schedule=schedule.read_text(encoding="utf-8") if schedule.exists() else "",
        evaluations=list(evaluations(run)),
    )


def _rollouts(run: RunEntry) -> list[ShownSample]:
    """Return the newest training sample of the newest prompts, for a run without responses to held-out questions."""
    shown: dict[str, ShownSample] = {}
    for row in rollouts.newest(run.folder, _NEWEST_ROLLOUTS):
        with suppress(KeyError, TypeError, ValueError):  # an edited file
            prompt = "\n".join(str(message["content"]) for message in row["prompt"])
            text = rollouts.conversation_text(row["completion"], row.get("turns"))
            shown.setdefault(prompt, ShownSample(prompt, text, reward=f"{float(row['reward']):.4g}"))
    return list(shown.values())[:_MOST_ROLLOUTS]


def evaluations(run: RunEntry) -> Iterator[TaskScore]:
    """The scores in `eval/*.json`, the newest last."""
    files = sorted((run.folder / "eval").glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files:
        try:
            lines = json.loads(path.read_bytes()).get("scores", [])
            yield from [TaskScore(**{name: str(line[name]) for name in line}) for line in lines]
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # somebody else's file


def _numbers(run: RunEntry) -> dict[str, str]:
    """Return final values, or those of the newest rows for a run without final values."""
    if numbers := run.record.get("numbers"):
        return dict(numbers)
    newest_values = {key: run.last(key) for key in ("step", "loss", "val_loss", "reward", "tokens_per_second")}
    return {key: f"{value:.4g}" for key, value in newest_values.items() if value is not None}


def _differences(runs: Sequence[RunEntry]) -> list[list[str]]:
    """Keys of the config that are not the same in all runs, with the value in each."""
    if len(runs) < 2:
        return []
    configs = [config_with_origins(run.folder / "config.yaml") for run in runs]
    lines = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key, NOTHING).partition("\n")[0] for config in configs]
        if len(set(values)) > 1 and key not in _PLACES:
            lines.append([key, *values])
    more = len(lines) - _MOST_DIFFERENCES
    return lines if more <= 0 else [*lines[:_MOST_DIFFERENCES], [f"and {more} more", *("" for _ in runs)]]

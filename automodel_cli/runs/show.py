"""Summary of one run as text."""

from __future__ import annotations

from collections.abc import Iterator

from automodel_cli.config.fix_syntax import word
from automodel_cli.runs.index import RunEntry, folder_size
from automodel_cli.training.checkpoint.directory import step_of
from automodel_cli.training.metrics.progress import show_duration


def details(run: RunEntry) -> Iterator[tuple[str, str]]:
    """Return (label, text) lines: state, model and data, final values, files, and the next commands."""
    record = run.record
    of = f" of {run.num_steps}" if run.num_steps else ""
    time = f"   {show_duration(run.seconds)}" if run.seconds else ""
    yield "run", f"{run.folder}   {run.state}   step {run.step}{of}{time}"
    if run.why:
        yield "why", run.why
    if command := record.get("command"):
        yield "command", command
    yield from record.get("about", {}).items()
    if run.attempts:
        yield "starts", "\n".join(map(_attempt, run.attempts))
        yield "code", "  ".join(f"{name} {text}" for name, text in run.attempts[-1].get("code", {}).items())
    if numbers := record.get("numbers"):
        yield "numbers", "  ".join(f"{name} {text}" for name, text in numbers.items())
    if complete := run.checkpoints.complete():
        best = run.checkpoints.best()
        marks = [f"{step_of(p):,}{' (best)' if best and p.resolve() == best else ''}" for p in complete]
        yield "checkpoints", f"step {', '.join(marks)}   {folder_size(run.checkpoints.path) / 2**20:,.1f} MiB"
    left = [name for name in ("export", "report.html", "logs", "eval") if (run.folder / name).exists()]
    if left:
        yield "left", "  ".join(str(run.folder / name) for name in left)
    if run.state == "running":
        yield "next", f"automodel runs tail {word(run.folder)}"
    elif run.state == "finished":
        yield "next", f"automodel report {word(run.folder)}"
    else:
        yield "next", f"automodel resume {word(run.folder)}"


def _attempt(attempt: dict[str, object]) -> str:
    begin = f"from step {attempt['first_step']}" if attempt.get("first_step") else ""
    ended = f" to {attempt['ended']}" if attempt.get("ended") else ""
    words = (f"{attempt['began']}{ended}", attempt["state"], f"on {attempt['host']}", begin)
    return "  ".join(str(word) for word in words if word)

"""One offline HTML file for one or several runs: curves, samples, data, layout, command and config. No scripts, no
external resources. Light and dark, for widths of 390 pixels and more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from automodel_cli.report.chart_axes import Rows, series
from automodel_cli.report.charts import histogram_svg, layout_svg, layout_text
from automodel_cli.report.page_style import STYLE
from automodel_cli.report.shown_run import ShownRun, ShownSample
from automodel_cli.report.sparkline import panel_svg, style_of
from automodel_cli.report.svg_sanitizer import plain_svg


def page_html(runs: Sequence[ShownRun], differences: Sequence[Sequence[str]] = ()) -> str:
    """Render the page of one or several runs. `differences`: lines of (name, value in each run)."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    sections = [
        f"<h1>{escape(title)}</h1>",
        _names(runs) if len(runs) > 1 else "",
        _figures(runs),
        _section("Evaluations", _evaluations(runs)),
        _section("Curves", _curves(runs)),
        _section("What differs", _differences(runs, differences)),
        _section("Samples", _samples(runs)),
        _section("Final values", _all_figures(runs[0]) if len(runs) == 1 else ""),
        _section("Data", _each(runs, _data)),
        _section("Layout", _each(runs, _layout)),
        _section("To repeat it", _each(runs, lambda run: f"<pre>{escape(run.command)}</pre>" if run.command else "")),
        _section("Environment", _each(runs, lambda run: _table(run.environment))),
        _section("Config", _each(runs, _config)),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


_CURVES = {
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens per second",
    "memory_gib": "Memory, GiB",
    "accuracy": "Accuracy",
}
_PICTURE = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/=]+")
_EXACT = ("lr", "tokens_per_second", "memory_gib")
"""Metrics that are drawn without smoothing, because an average would hide their steps."""
_OF_REWARDS = {
    "reward": "Reward",
    "response_length": "Response length",
    "entropy": "Entropy",
    "token_mult_prob_error": "Mismatch of sampler and trainer",
    "kl_penalty": "KL to the reference",
    "trainer_idle_fraction": "Share of the step without training",
    "engine_idle_fraction": "Share of the time without requests to a server",
}
"""Metrics of reinforcement learning in reading order. Their loss is not informative."""

_OF_TASK = re.compile(r"val_((\w+)_(accuracy|pass_at_\d+|reward))")
"""Metrics of validation tasks (`evaluation/validation.py`), with the name of the task."""


_OF_DATASET = re.compile(r"token_share_(.+)")
"""Metrics of the datasets of a mixture, with the name of the dataset."""


def _learns_from_rewards(runs: Sequence[ShownRun]) -> bool:
    return any("reward" in row for run in runs for row in run.rows)


def _curves(runs: Sequence[ShownRun]) -> str:
    """Draw all recorded metrics of the runs, each under its name. For one run also the last value."""
    order = {**_OF_REWARDS, **_CURVES} if _learns_from_rewards(runs) else {**_CURVES, **_OF_REWARDS}
    of_tasks = {m[1]: m for run in runs for row in run.rows for key in row if (m := _OF_TASK.fullmatch(key))}
    order = {**order, **{key: f"{m[2]}: {m[3].replace('_at_', '@')}" for key, m in of_tasks.items()}}
    of_datasets = {m[1] for run in runs for row in run.rows for key in row if (m := _OF_DATASET.fullmatch(key))}
    order = {**order, **{f"loss_{name}": f"Loss of {name}" for name in sorted(of_datasets)}}
    figures = []
    for key, heading in order.items():
        if svg := panel_svg([run.rows for run in runs], key, label=heading, smooth=key not in _EXACT):
            last = f"<span>{_last(runs[0].rows, key)}</span>" if len(runs) == 1 else ""
            figures.append(f"<figure><figcaption><b>{escape(heading)}</b>{last}</figcaption>{svg}</figure>")
    return f'<div class="grid2">{"".join(figures)}</div>' if figures else "<p>no step was recorded</p>"


def _last(rows: Rows, key: str) -> str:
    train, val = series(rows, key), series(rows, f"val_{key}")
    words = [f"{train[-1][1]:.4g}"] if train else []
    words += [f"validation (dots) {val[-1][1]:.4g}"] if val else []
    return ", ".join(words)


def _names(runs: Sequence[ShownRun]) -> str:
    items = (f'<li><i class="{style_of(i)}"></i>{escape(run.name)}</li>' for i, run in enumerate(runs))
    return f'<ul class="names">{"".join(items)}</ul>'


_TILES = ("loss", "val_loss", "reward", "val_reward", "accuracy after", "val_accuracy", "tokens_per_second")
_MOST_TILES = 12
_IMPORTANT = (
    *("state", "step", *_TILES, "accuracy before", "accuracy", "response_length", "truncation_rate", "entropy"),
    *("memory_gib", "mfu", "grad_norm", "step_seconds", "data_wait_share", "lr", "trainer_idle_fraction"),
)
"""Tiles of a run with more than `_MOST_TILES` final values, most important first. `best ...` precedes them."""


def _figures(runs: Sequence[ShownRun]) -> str:
    """Final figures: tiles of one run, a line for each of several."""
    if len(runs) > 1:
        names = [name for name in _TILES if any(name in run.numbers for run in runs)]
        head = ["run", "state", "step", *(name.replace("_", " ") for name in names)]
        lines = [
            [run.name, run.state, run.numbers.get("step", ""), *(run.numbers.get(name, "") for name in names)]
            for run in runs
        ]
        return _grid(head, lines)
    run = runs[0]
    ended = f'<p class="failed">{escape(run.state)}: {escape(run.why)}</p>' if run.why else ""
    numbers = _led(run.numbers) if _learns_from_rewards(runs) else run.numbers
    tiles = _tiles(numbers)
    cells = (
        f"<div><dt>{escape(label.replace('_', ' '))}</dt><dd>{escape(numbers[label])}</dd></div>" for label in tiles
    )
    return ended + (f"<dl>{''.join(cells)}</dl>" if numbers else "")


def _tiles(numbers: Mapping[str, str]) -> list[str]:
    """Return the names of the tiles: all if they are few, otherwise the most important ones. The order is kept."""
    if len(numbers) <= _MOST_TILES:
        return list(numbers)
    ranked = [*(name for name in numbers if name.startswith("best ")), *_IMPORTANT, *numbers]
    chosen = list(dict.fromkeys(name for name in ranked if name in numbers))[:_MOST_TILES]
    return [name for name in numbers if name in chosen]


def _all_figures(run: ShownRun) -> str:
    """Return the table of all final values, if the tiles show only some of them."""
    if len(run.numbers) <= _MOST_TILES:
        return ""
    table = _table({name.replace("_", " "): text for name, text in run.numbers.items()})
    return f"<details><summary>all {len(run.numbers)} values of the last step</summary>{table}</details>"


def _led(numbers: Mapping[str, str]) -> dict[str, str]:
    """Return final values, those with a curve first, each before its value on the validation rows."""
    first = [name for key in _OF_REWARDS for name in (key, f"val_{key}") if name in numbers]
    return {name: numbers[name] for name in [*first, *numbers]}


def _evaluations(runs: Sequence[ShownRun]) -> str:
    lines = [
        [*([run.name] if len(runs) > 1 else []), e.task, e.model, e.score, e.interval, e.note]
        for run in runs
        for e in run.evaluations
    ]
    head = [*(["run"] if len(runs) > 1 else []), "task", "model", "score", "interval", ""]
    return _grid(head, lines) if lines else ""


def _differences(runs: Sequence[ShownRun], differences: Sequence[Sequence[str]]) -> str:
    return _grid(["", *(run.name for run in runs)], differences) if differences else ""


def _samples(runs: Sequence[ShownRun]) -> str:
    """Return the samples of one run. For several runs: one line per prompt, with the response of each after
    training."""
    if len(runs) == 1:
        return _own_samples(runs[0].samples)
    prompts = list(dict.fromkeys(_key(sample) for run in runs for sample in run.samples))
    answers = [{_key(sample): sample for sample in run.samples} for run in runs]
    shown = [index for index, answer in enumerate(answers) if answer]
    lines = []
    for prompt in prompts:
        known = next(answer[prompt] for answer in answers if prompt in answer)
        responses = (answers[index][prompt].after if prompt in answers[index] else "" for index in shown)
        lines.append([known.prompt, *responses, known.expected or ""])
    head = ["prompt", *(runs[index].name for index in shown), "expected"]
    return _grid(head, lines, verbatim=True, pictures=[pictures for _, pictures in prompts]) if lines else ""


def _key(sample: ShownSample) -> tuple[str, tuple[str, ...]]:
    """Return what identifies the prompt of a sample."""
    return sample.prompt, tuple(sample.pictures)


def _own_samples(samples: Sequence[ShownSample]) -> str:
    if not samples:
        return ""
    optional = ("before", "expected", "reward")
    shown = [name for name in optional if any(getattr(sample, name) is not None for sample in samples)]
    columns = ["prompt", *shown[: "before" in shown], "after", *shown["before" in shown :]]
    lines = [[getattr(sample, column) or "" for column in columns] for sample in samples]
    head = ["response" if column == "after" and "reward" in shown else column for column in columns]
    return _grid(head, lines, verbatim=True, pictures=[sample.pictures for sample in samples])


def _data(run: ShownRun) -> str:
    text = f"<pre>{escape(run.about['data'])}</pre>" if "data" in run.about else ""
    figures = []
    for dataset in run.data:
        shares = [f"{100 * dataset.trained:.1f}% trained"] if dataset.trained is not None else []
        shares += [f"rows {100 * dataset.fill:.1f}% full"] if dataset.fill is not None else []
        picture = histogram_svg(dataset.edges, dataset.counts, label=dataset.text) if dataset.counts else ""
        caption = f"<b>{escape(dataset.text)}</b><span>{', '.join(shares)}</span>"
        figures.append(f"<figure><figcaption>{caption}</figcaption>{picture}</figure>")
    return text + (f'<div class="grid2" style="margin-top:1rem">{"".join(figures)}</div>' if figures else "")


def _layout(run: ShownRun) -> str:
    if not run.layout:
        return ""
    text = f"<p>{escape(layout_text(run.layout))}</p>"
    if max(run.layout.values()) > 1:
        text += f'<div class="grid2"><figure>{layout_svg(run.layout)}</figure></div>'
    schedule = plain_svg(run.schedule)
    return text + (f'<div class="picture">{schedule}</div>' if schedule else "")


def _config(run: ShownRun) -> str:
    if not run.config_yaml:
        return ""
    return f"<details><summary>every value with its origin</summary><pre>{escape(run.config_yaml)}</pre></details>"


def _each(runs: Sequence[ShownRun], draw: Any) -> str:
    """Return the drawing of each run, with names if there are several. Equal drawings are shown once."""
    by_text: dict[str, list[str]] = {}
    for run in runs:
        if text := draw(run):
            by_text.setdefault(text, []).append(run.name)
    if len(runs) == 1:
        return next(iter(by_text), "")
    return "\n".join(f"<h3>{escape(', '.join(names))}</h3>\n{text}" for text, names in by_text.items())


def _section(heading: str, body: str) -> str:
    return f"<h2>{heading}</h2>\n{body}" if body else ""


def _table(entries: Mapping[str, str]) -> str:
    cells = (f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in entries.items())
    return f'<div class="scroll"><table>{"".join(cells)}</table></div>' if entries else ""


def _grid(
    head: Sequence[str],
    lines: Iterable[Sequence[str]],
    *,
    verbatim: bool = False,
    pictures: Sequence[Sequence[str]] = (),
) -> str:
    """Return a table. `pictures`: those of each line, shown above the text of the first column."""

    def cell(text: str) -> str:
        return f"<td><pre>{escape(text)}</pre></td>" if verbatim else f"<td>{escape(text)}</td>"

    def images(number: int) -> str:
        urls = pictures[number] if number < len(pictures) else ()
        return "".join(f'<img src="{escape(url)}" alt="">' for url in urls if _PICTURE.fullmatch(url))

    rows = (["".join(map(cell, line)), images(number)] for number, line in enumerate(lines))
    body = "".join(f"<tr>{text.replace('<td>', f'<td>{shown}', 1)}</tr>" for text, shown in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'

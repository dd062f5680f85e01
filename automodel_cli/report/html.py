"""One offline HTML file per run: curves inline, numbers, samples, environment, config. No script, nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from automodel_cli.report.curve import loss_curve_svg, metric_svg

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2933;--dim:#616e7c;--line:#e4e7eb;--page:#fff;--soft:#f5f7fa}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--dim:#9fb0c0;--line:#26313c;--page:#12181f;--soft:#1a222b}}
body{font:15px/1.5 system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif;color:var(--ink);background:var(--page);
max-width:920px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 1rem}h2{font-size:1.05rem;margin:2rem 0 .5rem}
svg{width:100%;height:auto}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;margin:0}
dl div{background:var(--soft);border-radius:6px;padding:.5rem .75rem}
dt{color:var(--dim);font-size:.8rem;line-height:1.25;overflow-wrap:anywhere}dd{margin:0;font-weight:600;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid var(--line);padding:.35rem .6rem .35rem 0;
text-align:left;vertical-align:top}th{color:var(--dim);font-weight:500}
pre{background:var(--soft);border-radius:6px;padding:.75rem;overflow-x:auto;font-size:.82rem;margin:0}
td pre{background:none;padding:0;white-space:pre-wrap;font-size:.85rem}
"""


@dataclass(frozen=True)
class ShownSample:
    """A prompt with what the model said before and after training, and what was expected; None where not known."""

    prompt: str
    after: str
    before: str | None = None
    expected: str | None = None


def report_html(
    *,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, str],
    environment: Mapping[str, str],
    config_yaml: str,
    samples: Sequence[ShownSample] = (),
) -> str:
    """The page. `rows` are those of metrics.jsonl, `numbers` the final figures as they are to be read."""
    sections = [
        f"<h1>{escape(title)}</h1>",
        _numbers(_led(numbers)),
        *(f"<h2>{escape(heading)}</h2>\n{svg}" for heading, svg in _curves(rows, title)),
        _samples(samples),
        f"<h2>Environment</h2>\n{_table(environment)}",
        f"<h2>Config</h2>\n<pre>{escape(config_yaml)}</pre>",
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def write_report(
    run_dir: Path,
    *,
    rows: Sequence[Mapping[str, Any]],
    numbers: Mapping[str, str],
    environment: Mapping[str, str],
    config_yaml: str,
    samples: Sequence[ShownSample] = (),
) -> Path:
    """Write `report.html` and `loss.svg` into the run directory; returns the path of the page. Rank 0 only."""
    title = Path(run_dir).name
    page = report_html(
        title=title, rows=rows, numbers=numbers, environment=environment, config_yaml=config_yaml, samples=samples
    )
    (Path(run_dir) / "loss.svg").write_text(loss_curve_svg(rows, title=title), encoding="utf-8")
    path = Path(run_dir) / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


_LEAD = {
    "reward": "Reward",
    "response_length": "Response length",
    "entropy": "Entropy",
    "token_mult_prob_error": "Mismatch of sampler and trainer",
    "kl_penalty": "KL to the reference",
}
"""Curves of reinforcement learning, in the order in which they are read; the loss says little about it."""


def _curves(rows: Sequence[Mapping[str, Any]], title: str) -> list[tuple[str, str]]:
    """(heading, drawing): the loss, behind what the method records besides where that has rewards."""
    others = [(heading, metric_svg(rows, key, heading.lower())) for key, heading in _LEAD.items()]
    drawn = [(heading, svg) for heading, svg in others if svg]
    loss = ("Loss", loss_curve_svg(rows, title=title))
    return [*drawn, loss] if any("reward" in row for row in rows) else [loss, *drawn]


def _led(numbers: Mapping[str, str]) -> dict[str, str]:
    """Final figures with those of the curves in front, each before its value on the validation rows."""
    if "reward" not in numbers:
        return dict(numbers)
    first = [name for key in _LEAD for name in (key, f"val_{key}") if name in numbers]
    return {name: numbers[name] for name in [*first, *numbers]}


def _numbers(numbers: Mapping[str, str]) -> str:
    cells = (
        f"<div><dt>{escape(label.replace('_', ' '))}</dt><dd>{escape(text)}</dd></div>"
        for label, text in numbers.items()
    )
    return f"<dl>{''.join(cells)}</dl>" if numbers else ""


def _table(entries: Mapping[str, str]) -> str:
    cells = (f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in entries.items())
    return f"<table>{''.join(cells)}</table>"


def _samples(samples: Sequence[ShownSample]) -> str:
    if not samples:
        return ""
    columns = ["prompt"]
    columns += ["before"] if any(sample.before is not None for sample in samples) else []
    columns += ["after"]
    columns += ["expected"] if any(sample.expected is not None for sample in samples) else []
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = []
    for sample in samples:
        cells = (getattr(sample, column) for column in columns)
        lines.append("<tr>" + "".join(f"<td><pre>{escape(cell or '')}</pre></td>" for cell in cells) + "</tr>")
    return f"<h2>Samples</h2>\n<table><tr>{head}</tr>{''.join(lines)}</table>"

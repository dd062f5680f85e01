"""Model card of an export, built from the records of its run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from automodel_cli.runs.index import RunEntry
from automodel_cli.runs.report_page import CURVE, evaluations

CONFIG = "automodel_config.yaml"


def model_card(run: RunEntry, export: Path, *, licence: str | None, base_model: str | None) -> str:
    """Return Markdown with the hub's metadata: model, data, curve, scores, config, command and license. `base_model`:
    hub id of the base model, if it has one."""
    head, body = _split((export / "README.md").read_text(encoding="utf-8"))
    if licence:
        head["license"] = licence
    if base_model:
        head["base_model"] = base_model
    sections = [body.strip(), *_sections(run, licence, base_model)]
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n" + "\n\n".join(sections) + "\n"


def _split(text: str) -> tuple[dict[str, Any], str]:
    """Return the metadata at the top of a card, and the text below it."""
    if not text.startswith("---\n"):
        return {}, text
    head, _, body = text[4:].partition("\n---\n")
    return yaml.safe_load(head) or {}, body


def _sections(run: RunEntry, licence: str | None, base_model: str | None) -> Iterator[str]:
    yield f"## Training\n\n![loss]({CURVE})"
    if numbers := run.record.get("numbers"):
        lines = "\n".join(f"| {name.replace('_', ' ')} | {text} |" for name, text in numbers.items())
        yield f"| at the end | |\n|---|---|\n{lines}"
    if scores := list(evaluations(run)):
        lines = "\n".join(f"| {s.task} | {s.model} | {s.score} | {s.interval} | {s.note} |" for s in scores)
        yield f"## Evaluation\n\n| task | model | score | 95% interval | |\n|---|---|---|---|---|\n{lines}"
    if data := run.record.get("about", {}).get("data"):
        lines = "\n".join(data.splitlines()[:-1])  # the last one names a folder of this machine
        yield f"## Data\n\n```\n{lines}\n```"
    if command := run.record.get("command"):
        yield f"## To repeat it\n\nWith the config in `{CONFIG}`, every value with its origin:\n\n```\n{command}\n```"
    if licence:
        yield f"## Licence\n\n{licence}, as its publisher says."
    elif base_model:
        yield f"## Licence\n\nThe licence of [{base_model}](https://huggingface.co/{base_model}) and of the data holds."
    else:
        yield "## Licence\n\nIts publisher has named none; that of the data holds."

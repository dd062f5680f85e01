"""Fenced blocks of the documentation's pages: which are files, which are commands, and which of these are not run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """`title` names the file that the text is; `note` is the comment above the fence: why its commands are not run."""

    language: str
    title: str | None
    note: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    found = _FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(m["language"], m["title"], m["note"], m["text"]) for m in found]


def commands(page: Path) -> list[str]:
    """Every `automodel ...` command line of a page, in fences, indented blocks and inline code; without comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?: {4})?(automodel (?!-)[^\n]*)$", text, re.M) + re.findall(
        r"`(automodel (?!-)[^`\n]+)`", text
    )
    single = [part.strip() for line in lines for part in re.split(r"&&|\|", re.sub(r" #.*| {3,}.*", "", line))]
    return [line for line in single if line.startswith("automodel ")]


def documented_metrics() -> set[str]:
    """Keys that docs/metrics.md names."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return {name for row in re.findall(r"^\| (`[^|]*) \|", page, re.M) for name in re.findall(r"`(\w+)`", row)}


def undocumented_metrics(run: Path) -> set[str]:
    """Keys of a run's metrics.jsonl that docs/metrics.md does not name."""
    named = documented_metrics()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = {key.removeprefix("val_") if key.removeprefix("val_") in named else key for row in rows for key in row}
    return {key for key in keys - named if not key.startswith("reward_")}

"""Take the pictures of the README from a finished quickstart run: terminal output and report.

    automodel finetune llm -c quickstart > quickstart.log 2>&1
    python scripts/readme_pictures.py quickstart.log runs/quickstart/report.html

Writes docs/img/terminal.svg, and docs/img/report.png with headless Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "img"
WIDTH = 110
STEPS = (100, 300, 600, 900, 1100)


def shown_lines(log: str) -> list[str]:
    """Return the lines of the picture: the summary, a few steps, and the results.

    Values that depend on the load of the machine (speed, durations) are not part of the picture.
    """
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", log).replace("\r", "\n").splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("automodel "))
    begin = next(i for i, line in enumerate(lines) if line.startswith("step "))
    data = next(i for i, line in enumerate(lines) if line.startswith("data "))
    header = [line.replace(str(Path.home()), "~") for line in lines[first : min(begin, data + 4)]]
    rest = [line for line in lines[begin:] if line]
    steps = [re.sub(r"(  lr \S+).*", r"\1", line) for line in rest if _step_of(line) in STEPS]
    first_result = next(i for i, line in enumerate(rest) if line.startswith("accuracy after"))
    results = [line for line in rest[first_result:] if not line.startswith(("done", "ended"))]
    return [*header, "…", *steps, *results]


def _step_of(line: str) -> int | None:
    match = re.match(r"step +(\d+)/", line)
    return int(match[1]) if match else None


def terminal(log: str) -> None:
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text("$ automodel finetune llm -c quickstart", "bold green"))
    for line in shown_lines(log):
        text = Text(line)
        if not line.startswith("step"):
            text.highlight_regex(r"^[a-z]+(?= )", "bold cyan")
        console.print(text, no_wrap=True, overflow="ellipsis", crop=True)
    svg = console.export_svg(title="automodel")
    svg = re.sub(r"@font-face \{.*?\}\n?", "", svg, flags=re.S)  # no request to a font server
    (IMAGES / "terminal.svg").write_text(svg)


def report(page: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1180,860",
         f"--screenshot={IMAGES / 'report.png'}", page.resolve().as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip


if __name__ == "__main__":
    terminal(Path(sys.argv[1]).read_text())
    report(Path(sys.argv[2]))

"""The page in headless Chromium: nothing on its console, and never wider than the window. Skipped without it."""

from __future__ import annotations

import html
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from automodel_cli.pipelining.schedule.programs import build_program
from automodel_cli.pipelining.timeline.simulator import even_costs, simulate
from automodel_cli.pipelining.timeline.svg import draw_svg
from automodel_cli.report.html_page import page_html
from automodel_cli.report.shown_run import Dataset, ShownRun, ShownSample, TaskScore

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LONG = "x" * 300
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PICTURE = f"data:image/png;base64,{PIXEL}"
FRAMES = """<!doctype html><body>{frames}<script>
onload = () => document.title = [...document.querySelectorAll("iframe")].map(f => {{
  const root = f.contentDocument.documentElement;
  return [f.clientWidth, root.scrollWidth, f.contentDocument.querySelectorAll("svg").length].join("/");
}}).join(" ");
</script>"""


def shown(name: str, factor: float) -> ShownRun:
    keys = ("loss", "grad_norm", "lr", "tokens_per_second", "memory_gib", "reward", "entropy")
    rows = [{"step": s, **{key: factor * math.exp(-s / 40) for key in keys}} for s in range(1, 120)]
    program = build_program("1F1B", 4, 16)
    return ShownRun(
        name=name,
        rows=[*rows, {"step": 60, "val_loss": 0.4}],
        numbers={"state": "finished", "loss": "0.1", f"a_{LONG}": "1"},
        command=f"automodel finetune llm -c quickstart run_name={LONG}",
        about={"data": LONG},
        environment={"torch": "2.13", "cpu": LONG},
        config_yaml=f"key: {LONG}",
        samples=[ShownSample(LONG, LONG, LONG, LONG, pictures=[PICTURE] * 9)],
        data=[Dataset("x", f"9 documents of {LONG}", [0, 5, 10], [3, 6], 0.5, 0.9)],
        layout={"pp": 4, "dp_shard": 8, "tp": 8, "ep": 8},
        schedule=draw_svg(simulate(program, even_costs(program)), title="1F1B"),
        evaluations=[TaskScore(LONG, "after", "0.71", "0.6 to 0.8", LONG)],
    )


@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_no_horizontal_scroll_and_no_console_error(tmp_path: Path) -> None:
    one = page_html([shown(f"run-{LONG}", 1.0)])
    several = page_html([shown(f"run-{i}-{LONG}", 1.0 + i / 9) for i in range(9)], [[f"key.{LONG}", *[LONG] * 9]])
    frames = "".join(
        f'<iframe srcdoc="{html.escape(page)}" style="border:0;width:{width}px;height:900px"></iframe>'
        for page in (one, several)
        for width in (1280, 390)
    )
    (tmp_path / "frames.html").write_text(FRAMES.format(frames=frames))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom",
         f"--user-data-dir={tmp_path}/profile", "--window-size=1400,1000", (tmp_path / "frames.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    found = [tuple(map(int, entry.split("/"))) for entry in title[1].split()]
    assert len(found) == 4
    for width, scroll_width, drawings in found:
        assert scroll_width <= width, found
        assert drawings >= 9
    assert "CONSOLE" not in done.stderr, done.stderr

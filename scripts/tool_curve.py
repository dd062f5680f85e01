"""The kept curve of a run with tools: results/NAME.json and docs/img/NAME.svg from the metrics.jsonl of RUN.

python scripts/tool_curve.py RUN NAME KEY=VALUE...    # what no file of the run says: command, hardware, cpu_seconds
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from automodel_cli.report.sparkline import HEIGHT, WIDTH, panel_svg

ROOT = Path(__file__).parents[1]
KEPT = (
    "reward",
    "reward_exact",
    "turns",
    "truncated",
    "response_length",
    "num_zero_std_groups",
    "entropy",
    "step_seconds",
)
STYLE = """<style>
text{font:12px Inter,Helvetica,Arial,sans-serif;fill:#6b7280} .grid{stroke:#e5e7eb} .axis{stroke:#9ca3af;fill:none}
.line{fill:none;stroke-width:2} .line.c0{stroke:#2563eb} .line.c1{stroke:#d97706}
</style>"""
LEGEND = (("right answers", "#2563eb"), ("the tool was called", "#d97706"), ("share of a step's 16 samples", "#6b7280"))


def main(run: Path, name: str, *told: str) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    held_out = {str(row["step"]): row["val_reward"] for row in rows if "val_reward" in row}
    kept = {key: [None if row.get(key) is None else round(row[key], 4) for row in steps] for key in KEPT}
    facts = dict(word.split("=", 1) for word in told)
    record = {**facts, "held_out_reward": held_out, "steps": [row["step"] for row in steps], **kept}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    (ROOT / "results" / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
    right, calls = (
        [{"step": row["step"], "share": value(row)} for row in steps]
        for value in (lambda row: row["reward_exact"], lambda row: row["turns"] - 1)
    )
    svg = panel_svg([right, calls], "share", label="Right answers and tool calls over steps", smooth=False)
    head, _, body = svg.partition("\n")
    legend = "\n".join(
        f'<text x="{WIDTH - 12}" y="{HEIGHT - 80 + 18 * line}" text-anchor="end" style="fill:{colour}">{words}</text>'
        for line, (words, colour) in enumerate(LEGEND)
    )
    head = head.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" ', 1)
    white = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    (ROOT / "docs" / "img" / f"{name}.svg").write_text("\n".join([head, STYLE, white, legend, body]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

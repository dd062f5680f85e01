"""Draw the curves of docs/planning/scale.md: goodput by formula (lines) and by simulation (dots).

    python scripts/goodput_curves.py [FOLDER]

Writes goodput_interval.svg, goodput_spares.svg and goodput_slowest.svg. Deterministic, about 20 CPU seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from automodel_cli.planning.goodput import HOURS, Cluster, best_interval, expected, simulate
from automodel_cli.planning.scale import expected_maximum, simulated_maximum

FOLDER = Path(__file__).resolve().parent.parent / "docs/img"
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 320, 56, 44, 40
_COLORS = ("#1f6feb", "#d9480f", "#2b8a3e")
_DAYS = 400 * 24 * HOURS


class Curve(NamedTuple):
    """`line` is a closed form, `dots` a simulation: (x, y)."""

    name: str
    line: Sequence[tuple[float, float]]
    dots: Sequence[tuple[float, float]]


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0]) if arguments else FOLDER
    for name, text in (("interval", intervals()), ("spares", spares()), ("slowest", slowest())):
        (folder / f"goodput_{name}.svg").write_text(text, encoding="utf-8")
    return 0


def cluster(gpus: int) -> Cluster:
    """A GPU fails every 50,000 hours; 30 s of checkpoint, 10 minutes of restart, steps of 5 s."""
    return Cluster(nodes=gpus // 8, step=5.0, node_mtbf=50_000 / 8 * HOURS, save=30.0, restart=600.0)


def intervals() -> str:
    curves = []
    for gpus in (512, 2048, 4096):
        of = cluster(gpus)
        minutes = [3 * 1.25**i for i in range(22)]
        line = [(m, expected(of, m * 60 / of.step)) for m in minutes]
        dots = [(m, simulate(of, m * 60 / of.step, seconds=_DAYS).kept) for m in minutes[::3]]
        best = best_interval(of) * of.step / 60
        curves.append(Curve(f"{gpus:,} GPUs, best {best:.0f} minutes", line, dots))
    return drawn("Goodput by checkpoint interval", "minutes between checkpoints", curves, logarithmic=True)


def spares() -> str:
    curves = []
    for gpus in (512, 2048, 4096):
        of = replace(cluster(gpus), repair=24 * HOURS)
        every = best_interval(of)
        bounds = [expected(replace(of, spares=0), every), expected(of, every)]
        dots = [(n, simulate(replace(of, spares=n), every, seconds=_DAYS).kept) for n in range(9)]
        line = [(0, bounds[0]), (0, bounds[1]), (8, bounds[1])]
        curves.append(Curve(f"{gpus:,} GPUs", line, dots))
    return drawn("Goodput by spare nodes, 24 hours of repair", "spare nodes", curves)


def slowest() -> str:
    curves = []
    for jitter in (0.01, 0.02, 0.05):
        nodes = [8 * 2**i for i in range(7)]
        line = [(n, 1 / (1 + jitter * expected_maximum(n))) for n in nodes]
        dots = [(n, 1 / simulated_maximum(n, jitter, 400)) for n in nodes]
        curves.append(Curve(f"deviation {jitter:.0%}", line, dots))
    return drawn("Throughput with the slowest of all nodes", "nodes", curves, logarithmic=True)


def drawn(title: str, axis: str, curves: Sequence[Curve], *, logarithmic: bool = False) -> str:
    """Return the SVG."""
    points = [point for curve in curves for point in (*curve.line, *curve.dots)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    scale = math.log if logarithmic else float
    low, high = scale(min(xs)), scale(max(xs))
    floor = math.floor(10 * min(ys)) / 10

    def place(x: float, y: float) -> str:
        right = _LEFT + (scale(x) - low) / (high - low) * (_WIDTH - _LEFT - 20)
        return f"{right:.1f},{_TOP + (1 - y) / (1 - floor) * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/><g font-size="12">',
        f'<text x="{_LEFT}" y="22" font-size="15">{title}</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{axis}</text>',
    ]
    for i in range(6):
        y = floor + (1 - floor) * i / 5
        left, up = place(min(xs), y).split(",")
        parts.append(f'<line x1="{left}" y1="{up}" x2="{_WIDTH - 20}" y2="{up}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{float(up) + 4:.1f}" text-anchor="end">{y:.0%}</text>')
    for x in sorted({x for x, _ in curves[0].dots}):
        left = place(x, floor).split(",")[0]
        parts.append(f'<text x="{left}" y="{_HEIGHT - 28}" text-anchor="middle">{x:.0f}</text>')
    for number, (curve, color) in enumerate(zip(curves, _COLORS, strict=False)):
        line = " ".join(place(*point) for point in curve.line)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for at in (place(*point).split(",") for point in curve.dots):
            parts.append(f'<circle cx="{at[0]}" cy="{at[1]}" r="3.5" fill="{color}"/>')
        y = _HEIGHT - _BOTTOM - 12 - 16 * (len(curves) - 1 - number)
        parts.append(f'<text x="{_LEFT + 12}" y="{y}" fill="{color}">{curve.name}</text>')
    return "\n".join([*parts, "</g></svg>", ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

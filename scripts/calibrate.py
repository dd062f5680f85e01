"""Fit the constants of the dry run to published runs, and write the table of docs/planning/calibration.md.

    python scripts/calibrate.py [--trace [ID ...]] [--suite gpu_suite.json] [--write]

`--trace` dry-runs rows of scripts/published_runs.yaml (all that results/calibration.json lacks, or those named; 15 to
200 CPU seconds each). Without it, the stored counts are fitted again, which takes seconds. `--suite` adds the runs that
scripts/gpu_suite.sh measured. `--write` updates automodel_cli/planning/efficiencies.json and the page.

Counted, from the dry run: seconds of each kind of cost on the critical path at given rates. Fitted: one factor per GPU
type on all compute rates (`power`), and factors that all GPU types share. A row's time is the sum over kinds of counted
seconds over factors. The fit is a bounded Gauss-Newton least squares of logarithms with a weak pull to the start. The
range of an estimate is that of (published / estimated) over all rows, left out of the fit one by one.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from automodel_cli.distributed.wgrad_fusion import gemm_timings
from automodel_cli.planning.efficiency import FILE
from automodel_cli.planning.hardware import GPUS

ROOT = Path(__file__).resolve().parent.parent
RUNS, COUNTS = ROOT / "scripts/published_runs.yaml", ROOT / "results/calibration.json"
PAGE = ROOT / "docs/planning/calibration.md"
GOAL, MEMORY_GOAL = 0.15, 0.10
_NOISE = 0.07
"""Standard deviation of a row's logarithm: what programs differ in that nobody counts."""


class Start(NamedTuple):
    """Where a constant starts, how far (standard deviation of its logarithm) it is pulled back, and its bounds."""

    value: float
    pull: float
    low: float
    high: float


SHARED = {
    "gemm_fp8": Start(0.85, 0.15, 0.5, 1.0),
    "grouped": Start(1.0, 0.15, 0.6, 1.1),
    "attention": Start(1.0, 0.15, 0.7, 1.2),
    "memory": Start(0.80, 0.10, 0.5, 0.95),
    "node": Start(0.70, 0.15, 0.3, 0.9),
    "network": Start(0.60, 0.30, 0.2, 0.9),
    "interference": Start(0.05, 0.50, 0.01, 0.5),
    "cudnn": Start(1.60, 0.10, 1.2, 2.2),
}
"""Of all GPU types. The first three are relative to `power`; `cudnn` is the speed of cuDNN's attention (Transformer
Engine) relative to FlashAttention-2."""
POWER = Start(0.85, 0.15, 0.4, 1.0)


@dataclass(frozen=True)
class Row:
    """A published run and its counts. `seconds` by kind of cost at rates of 1 (`interference`: per unit)."""

    name: str
    gpu: str
    published: float
    tokens: float
    seconds: Mapping[str, float]
    peak_gib: float
    memory_gib: float | None
    memory_kind: str
    fits: bool
    why: str
    source: str

    def estimate(self, constants: Mapping[str, float]) -> float:
        """Tokens per second and GPU."""
        return self.tokens / sum(self.by_kind(constants).values())

    def by_kind(self, constants: Mapping[str, float]) -> dict[str, float]:
        power = constants[f"power {self.gpu}"]
        found = {}
        for kind, seconds in self.seconds.items():
            if kind in ("gemm", "gemm_fp8", "grouped", "attention", "cudnn"):
                relative = 1.0 if kind == "gemm" else constants["attention" if kind == "cudnn" else kind]
                found[kind] = seconds / (power * relative * (constants["cudnn"] if kind == "cudnn" else 1.0))
            elif kind == "interference":
                found[kind] = seconds * constants[kind]
            else:
                found[kind] = seconds / constants.get(kind, 1.0)
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="*", metavar="ID", help="dry-run these rows, or all that are missing")
    parser.add_argument("--suite", type=Path, help="results of scripts/gpu_suite.sh")
    parser.add_argument("--write", action="store_true", help="update the constants and the page")
    given = parser.parse_args(arguments)
    published = yaml.safe_load(RUNS.read_text(encoding="utf-8"))
    if given.trace is not None:
        trace_rows(published, given.trace)
    rows = [*rows_of(published, json.loads(COUNTS.read_text(encoding="utf-8"))), *(_of_suite(given.suite))]
    fitted = fit([row for row in rows if row.fits])
    unseen = {row.name: left_out(rows, row) for row in rows}
    known = constants_of(rows, fitted, unseen)
    table = page(published, rows, fitted, unseen, known)
    print(table)
    if given.write:
        FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(table, encoding="utf-8")
    far = [row.name for row in rows if row.fits and _is_far(row.estimate(fitted), row)]
    if far:
        print(f"more than {GOAL:.0%} off: {', '.join(far)}", file=sys.stderr)
    return 1 if far else 0


def _is_far(estimate: float, row: Row) -> bool:
    return abs(estimate / row.published - 1) > GOAL


def trace_rows(published: Mapping[str, Any], names: Sequence[str]) -> None:
    """Dry-run rows and store what they count."""
    known = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    for row in published["rows"]:
        if row["id"] in names or not (names or "not_run" in row or row["id"] in known):
            known[row["id"]] = counted(published, row)
            COUNTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(f"traced {row['id']}", flush=True)


def counted(published: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """What a dry run counts of a row: seconds by kind of cost at rates of 1, tokens per step and GPU, GiB."""
    from automodel_cli.dryrun.command import trace_config
    from automodel_cli.dryrun.types import TraceRequest
    from automodel_cli.models.hub.bundled_configs import bundled_config_path

    base = published["base"][row["base"]]
    words = re.split(r" (?=[a-z_.0-9]+=)", f"{base['set']} {row['set']}")
    settings = {word.partition("=")[0]: word for word in words}
    with tempfile.TemporaryDirectory() as folder:
        if "model" in row:
            changes = dict(published["models"][row["model"]])
            config = json.loads(bundled_config_path(changes.pop("like")).read_text(encoding="utf-8"))
            (Path(folder) / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
            settings["model.pretrained"] = f"model.pretrained={folder}"
        length = int(settings["data.seq_len"].partition("=")[2])
        overrides = tuple(settings.values())
        request = TraceRequest(
            base["recipe"], overrides, row["gpus"], gpu=row["gpu"], document=row.get("document", length)
        )
        found = trace_config(request, row.get("ranks", (0,)))
    return found.counted()


def rows_of(published: Mapping[str, Any], counts: Mapping[str, Any]) -> list[Row]:
    """Rows with their counts, and what is counted by hand in addition."""
    found = []
    for row in published["rows"]:
        if row["id"] not in counts:
            continue
        known = counts[row["id"]]
        seconds = dict(known["seconds"])
        if "more_gemm" in row:
            kind = "gemm_fp8" if "gemm_fp8" in seconds else "gemm"
            peak = GPUS[row["gpu"]].peak_bf16 * gemm_timings.single(math.inf) * (2 if kind == "gemm_fp8" else 1)
            seconds[kind] += row["more_gemm"] * 1e12 / peak
        if row.get("attention") == "cudnn":
            seconds["cudnn"] = seconds.pop("attention")
        kind, memory = next(iter(row.get("memory", {"": None}).items()))
        peak_gib = known["peak_gib"] + row.get("more_gib", 0.0)
        out = row.get("left_out", "")
        differs = "; ".join(filter(None, (row.get("why", ""), out)))
        found.append(
            Row(row["id"], row["gpu"], row["tokens"], known["tokens"], seconds, peak_gib, memory, kind, not out,
                differs, row["source"])
        )  # fmt: skip
    return found


def _of_suite(path: Path | None) -> list[Row]:
    """Runs that `scripts/gpu_suite.sh` measured and dry-ran on this GPU."""
    if path is None:
        return []
    suite = json.loads(path.read_text(encoding="utf-8"))
    results = suite["pieces"]
    found = []
    for name, piece in results.items():
        shape = name.removeprefix("speed: ")
        dry = results.get(f"memory by dry run: {shape}", {}).get("figures")
        if shape == name or piece["status"] != "ok" or dry is None:
            continue
        speed, counts = piece["figures"], dry["counted"]
        found.append(
            Row(f"suite-{shape}", suite["gpu"], speed["tokens_per_second"], counts["tokens"], counts["seconds"],
                counts["peak_gib"], speed["memory_gib"], "reserved", True, "measured here", "gpu_suite")
        )  # fmt: skip
    return found


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Constants that explain `rows`: bounded Gauss-Newton on logarithms, pulled weakly to where they start."""
    start = SHARED | {f"power {gpu}": POWER for gpu in sorted({row.gpu for row in rows})}
    names = list(start)
    origin = torch.tensor([math.log(start[name].value) for name in names], dtype=torch.float64)
    low, high = (torch.tensor([math.log(start[name][at]) for name in names], dtype=torch.float64) for at in (2, 3))
    pull = torch.tensor([start[name].pull for name in names], dtype=torch.float64)

    def residuals(x: torch.Tensor) -> torch.Tensor:
        constants = dict(zip(names, x.exp().tolist(), strict=True))
        of_rows = [math.log(row.estimate(constants) / row.published) / _NOISE for row in rows]
        return torch.cat([torch.tensor(of_rows, dtype=torch.float64), (x - origin) / pull])

    x, step = origin.clone(), 1e-4
    for _ in range(20):
        now = residuals(x)
        slopes = [(residuals(x + step * unit) - now) / step for unit in torch.eye(len(names), dtype=torch.float64)]
        change = torch.linalg.lstsq(torch.stack(slopes, 1), -now.unsqueeze(1)).solution[:, 0]
        x = (x + change).clamp(low, high)
    return dict(zip(names, x.exp().tolist(), strict=True))


def left_out(rows: Sequence[Row], row: Row) -> float:
    """The estimate of a row by constants that were fitted to the others. A GPU type that no other row has takes the
    `power` of H100."""
    constants = fit([other for other in rows if other.fits and other is not row])
    return row.estimate({f"power {row.gpu}": constants["power h100"]} | constants)


def constants_of(rows: Sequence[Row], fitted: Mapping[str, float], unseen: Mapping[str, float]) -> dict[str, Any]:
    """The content of efficiencies.json."""
    used = [row for row in rows if row.fits]
    ratios = {gpu: [row.published / unseen[row.name] for row in used if row.gpu == gpu] for gpu in GPUS}
    every = [row.published / unseen[row.name] for row in rows]  # Also of rows that are not in the fit.
    reserved = [row.memory_gib / row.peak_gib for row in rows if row.memory_gib and row.memory_kind == "reserved"]
    powers = [fitted[name] for name in fitted if name.startswith("power ")]
    gpus = {}
    for gpu in GPUS:
        power = fitted.get(f"power {gpu}", fitted["power h100"])
        few = "" if ratios[gpu] else "no published run: as h100, with the range of all GPU types"
        of_gpu = [ratio * other / power for ratio in every for other in powers] if few else every
        gpus[gpu] = {
            "gemm": power,
            **{kind: power * fitted[kind] for kind in ("gemm_fp8", "grouped", "attention")},
            **{kind: fitted[kind] for kind in ("memory", "node", "network", "interference")},
            "copy": 0.7, "host": 5e-6,
            "low": min(0.95, *of_gpu), "high": max(1.05, *of_gpu),
            "reserved_low": min(reserved), "reserved_high": max(reserved),
            "provenance": few or f"{len(ratios[gpu])} published run{'s' * (len(ratios[gpu]) > 1)}",
        }  # fmt: skip
        gpus[gpu] = {k: round(v, 9 if k == "host" else 4) if isinstance(v, float) else v for k, v in gpus[gpu].items()}
    return {"source": "scripts/calibrate.py, from scripts/published_runs.yaml", "gpus": gpus}


def page(
    published: Mapping[str, Any],
    rows: Sequence[Row],
    fitted: Mapping[str, float],
    unseen: Mapping[str, float],
    known: Mapping[str, Any],
) -> str:
    """docs/planning/calibration.md with new tables: each stands between `<!-- NAME -->` and `<!-- end -->`."""
    used = [row for row in rows if row.fits]
    errors = [sorted(abs(x) for x in found) for found in (
        [row.estimate(fitted) / row.published - 1 for row in used],
        [unseen[row.name] / row.published - 1 for row in used],
    )]  # fmt: skip
    median, worst = ([f"{found[at]:.0%}" for found in errors] for at in (len(used) // 2, -1))
    distant = (row for row in rows if _is_far(unseen[row.name], row))
    far = ", ".join(f"{row.name} ({unseen[row.name] / row.published - 1:+.0%})" for row in distant)
    blocks = {
        "summary": [
            f"{len(used)} runs are in the fit. The median error is {median[0]} and the largest {worst[0]}.",
            f"For runs that are left out of the fit they are {median[1]} and {worst[1]}.",
            f"Further off than {GOAL:.0%} when left out: {far or 'none'}.",
            "The estimated range covers every run of the table.",
        ],
        "runs": _speeds(rows, fitted, unseen, known),
        "notes": _notes(published, rows),
        "memory": _memories(rows, known),
        "constants": _constants(known, fitted),
        "shares": _shares(rows, fitted),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in blocks.items():
        pattern = rf"<!-- {name} -->\n.*?<!-- end -->"
        block = "\n".join([f"<!-- {name} -->", *lines, "", "<!-- end -->"])
        text = re.sub(pattern, block.replace("\\", r"\\"), text, flags=re.DOTALL)
    return text


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _speeds(
    rows: Sequence[Row], fitted: Mapping[str, float], unseen: Mapping[str, float], known: Mapping[str, Any]
) -> list[str]:
    lines = []
    for row in rows:
        estimate, rates = row.estimate(fitted), known["gpus"][row.gpu]
        spread = f"{estimate * rates['low']:,.0f} to {estimate * rates['high']:,.0f}"
        errors = [f"{value / row.published - 1:+.0%}" for value in (estimate, unseen[row.name])]
        name = row.name if row.fits else f"({row.name})"
        lines.append([name, row.gpu, row.source, f"{row.published:,.0f}", spread, *errors])
    return _table(["run", "GPU", "source", "published [tokens/s/GPU]", "estimated range", "error", "left out"], lines)


def _notes(published: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Sources, and what is counted by hand or not in the fit."""
    lines = [f"- **{row.name}**: {row.why}" for row in rows if row.why]
    names = {row.name for row in rows}
    for row in (row for row in published["rows"] if row["id"] not in names):
        reason = row.get("not_run", "not dry-run yet")
        lines.append(f"- **{row['id']}** ({row['tokens']:,} tokens/s/GPU), no estimate: {reason}")
    lines += ["", "Sources:", ""]
    for name, source in published["sources"].items():
        lines.append(f"- `{name}`: [{source['title']}]({source['url']}), {source['commit']}")
    return lines


def _memories(rows: Sequence[Row], known: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in (row for row in rows if row.memory_gib):
        assert row.memory_gib is not None
        rates = known["gpus"][row.gpu]
        low, high = (rates["reserved_low"], rates["reserved_high"]) if row.memory_kind == "reserved" else (1.0, 1.0)
        spread = f"{row.peak_gib * low:.1f} to {row.peak_gib * high:.1f}" if high > low else f"{row.peak_gib:.1f}"
        middle = row.peak_gib * math.sqrt(low * high)
        lines.append(
            [row.name, f"{row.memory_gib:.1f} {row.memory_kind}", f"{row.peak_gib:.1f}", spread,
             f"{middle / row.memory_gib - 1:+.0%}"]
        )  # fmt: skip
    return _table(["run", "published [GiB]", "counted peak", "estimated", "error of the middle"], lines)


def _constants(known: Mapping[str, Any], fitted: Mapping[str, float]) -> list[str]:
    kinds = ("gemm", "gemm_fp8", "grouped", "attention", "memory", "node", "network", "interference", "low", "high")
    gpus = known["gpus"].items()
    lines = [[gpu, *(f"{rates[kind]:.2f}" for kind in kinds), rates["provenance"]] for gpu, rates in gpus]
    attention = f"cuDNN attention is {fitted['cudnn']:.2f} times as fast as FlashAttention-2 in these runs."
    return [*_table(["GPU", *(f"`{kind}`" for kind in kinds), "fitted to"], lines), "", attention]


def _shares(rows: Sequence[Row], fitted: Mapping[str, float]) -> list[str]:
    kinds = ("gemm", "gemm_fp8", "grouped", "attention", "memory", "node", "network", "interference")
    lines = []
    for row in rows:
        seconds = row.by_kind(fitted)
        seconds["attention"] = seconds.get("attention", 0.0) + seconds.pop("cudnn", 0.0)
        whole = sum(seconds.values())
        lines.append([row.name, *(f"{seconds.get(kind, 0.0) / whole:.0%}" for kind in kinds)])
    return _table(["run", *(f"`{kind}`" for kind in kinds)], lines)


if __name__ == "__main__":
    sys.exit(main())

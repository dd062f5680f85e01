"""Integrity check of a run folder: metrics, checkpoints and export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from automodel_cli.config.diagnostics import Finding
from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.training.checkpoint.directory import CheckpointDir, damage, read_meta
from automodel_cli.training.metrics_file import read_metrics


def examine(run_dir: Path) -> Iterator[Finding]:
    """Metrics, every checkpoint (all its bytes are read) and the export."""
    metrics = run_dir / "metrics.jsonl"
    num_lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    rows = read_metrics(metrics)
    lost = num_lines - len(rows)
    text = f"{len(rows):,} rows, the last of step {rows[-1]['step']}" if rows else "none yet"
    yield ("warn", "metrics", f"{text}; {lost} lines cannot be read", "") if lost > 0 else ("ok", "metrics", text, "")
    folder = CheckpointDir(run_dir / "checkpoints")
    for path in reversed(folder.complete()):
        yield _examine(path)
    for path in sorted(folder.path.glob("step-*.damaged")) if folder.path.is_dir() else ():
        yield "warn", path.name, "was set aside as damaged", f"rm -r {word(path)}"
    if not folder.complete():
        yield "warn", "checkpoints", "none; a resume starts over", f"automodel resume {word(run_dir)}"
    if (run_dir / "export").is_dir():
        yield _export(run_dir / "export")


def _examine(path: Path) -> Finding:
    try:
        meta = read_meta(path)
    except RunError as error:
        return "fail", path.name, error.message.partition("damaged: ")[2], error.fix or ""
    files = meta["files"]
    if problems := damage(path, files, sorted(files)):
        return "fail", path.name, "; ".join(problems), f"mv {word(path)} {word(f'{path}.damaged')}"
    size = sum(note["bytes"] for note in files.values())
    return "ok", path.name, f"complete: {len(files)} files, {size / 2**20:,.1f} MiB, checksums match", ""


def _export(folder: Path) -> Finding:
    """Check whether every weight file of the export exists and has the length in its header."""
    fix = f"automodel export {word(folder.parent)}"
    index = folder / "model.safetensors.index.json"
    try:
        names = {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        for name in sorted(names):
            _check_length(folder / name)
    except FileNotFoundError as error:
        return "fail", "export", f"{Path(error.filename).name} is missing", fix
    except (ValueError, KeyError) as error:
        return "fail", "export", f"{error}", fix
    return "ok", "export", f"{len(names)} weight files of the right length", ""


def _check_length(path: Path) -> None:
    """A safetensors file is 8 bytes of header length, the header, and as many bytes as its last tensor ends at."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path.name} is cut short")
        header = json.loads(file.read(size))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if 8 + size + end != path.stat().st_size:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, its header says {8 + size + end:,}")

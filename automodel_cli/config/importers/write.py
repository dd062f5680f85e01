"""Write a translated draft as YAML with a comment for each key: the origin of its value, and missing counterparts."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose, scalar
from automodel_cli.config.composition.yaml_limits import check_file
from automodel_cli.config.composition.yaml_marks import yaml_error
from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.importer_registry import TABLES, recognise
from automodel_cli.config.importers.framework import Draft, Kind, Table, translate

_SECTIONS = (
    *(
        "run_name",
        "output_dir",
        "seed",
        "reference_mode",
        "model",
        "teacher",
        "data",
        "objective",
        "rollout",
        "rewards",
        "optimizer",
    ),
    *("lr_scheduler", "parallelizer", "mesh", "pipeline", "train", "validation", "checkpoint", "logging"),
)
_IN_BASE = {
    "sft": {"optimizer": "adamw", "lr_scheduler": "cosine", "parallelizer": "fsdp2"},
    "kd": {"optimizer": "adamw", "lr_scheduler": "cosine", "parallelizer": "fsdp2", "objective": "kd"},
    "dpo": {"optimizer": "adamw", "lr_scheduler": "cosine", "parallelizer": "fsdp2", "objective": "dpo"},
    "grpo": {
        "optimizer": "adamw",
        "lr_scheduler": "constant",
        "parallelizer": "fsdp2",
        "objective": "grpo",
        "rollout": "sampler",
    },
}
_WIDTH = 58


def imported(path: Path, *, slug: str | None = None, gpus: int = 1, kind: Kind | None = None) -> str:
    """Return the YAML for another tool's file. Raises ConfigError if the tool cannot be identified."""
    source = read_config(path)
    table = TABLES[slug] if slug is not None else recognise(source)
    if table is None:
        raise ConfigError(
            f"{path} was not written for a known tool ({', '.join(TABLES)})",
            code="unsupported_file_type",
            keys=("--from",),
            fix=f"automodel import-config {word(path)} --from axolotl   (or whichever wrote it)",
        )
    draft = translate(source, table, gpus, kind)
    text = render_config(draft, table, path.name)
    draft.undecided += _refusals(text)
    return render_config(draft, table, path.name)


def _refusals(text: str) -> list[str]:
    """Return the errors of `automodel check` for the translated file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "imported.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            recipe: Any = check_config(compose(path), untrusted=[])
            errors = list(recipe.missing_files())
        except ConfigError as error:
            errors = [error]
    return [line for error in errors for line in _without_places(str(error))]


def _without_places(text: str) -> Iterator[str]:
    """Lines of one error or of a list of them, without the lines of a file that the user never sees."""
    first, *rest = text.splitlines()
    if not rest or not first.endswith("nothing was started"):
        yield f"check: {first}"
        yield from (line for line in rest if not line.startswith("  from"))
        return
    for line in rest:
        place = re.match(r" *\S+\.yaml:\d+ +", line)
        yield f"check: {line[place.end() :]}" if place else line


def read_config(path: Path) -> dict[str, object]:
    """Read a YAML, JSON or TOML file as plain values. Interpolations are resolved if possible."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", code="missing_file")
    check_file(path)
    text = path.read_text(encoding="utf-8")
    try:
        tree: Any = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, get_yaml_loader())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", code="damaged_file") from error
    except yaml.MarkedYAMLError as error:
        raise yaml_error(path, error) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} has no keys at its root", code="damaged_file")
    if "${" not in text:
        return tree
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException:
        return tree  # an interpolation refers to another file: leave them as text
    return dict(resolved)


def render_config(draft: Draft, table: Table, name: str) -> str:
    """Write the complete file."""
    _fit_optimizer(draft)
    lines = [
        f"# {name} of {table.tool}, by `automodel import-config`. Behind each value stands what it was there.",
        f"# Loss: {table.averaging}.",
        *_undecided(draft),
        "defaults:",
        f"  - {draft.base}",
        *_options(draft),
        "  - _self_",
        "",
        *_tree(draft),
    ]
    if draft.left:
        lines += ["", f"# {table.tool}'s keys without a counterpart here:"]
        lines += [f"#   {key}: {format_value(draft.source[key], 80)}   {why}" for key, why in draft.left.items()]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _undecided(draft: Draft) -> Iterator[str]:
    if draft.undecided:
        yield "#"
        yield "# To decide before it trains:"
    for text in draft.undecided:
        yield f"#     {text.strip()}" if text.startswith(" ") else f"# - {text}"
    if draft.undecided:
        yield ""


def _fit_optimizer(draft: Draft) -> None:
    """Rename options: Muon has separate names for its AdamW."""
    if draft.options.get("optimizer") != "muon":
        return
    for name in ("betas", "eps"):
        if f"optimizer.{name}" in draft.values:
            draft.values[f"optimizer.adamw_{name}"] = draft.values.pop(f"optimizer.{name}")
            draft.notes[f"optimizer.adamw_{name}"] = draft.notes.pop(f"optimizer.{name}")


def _options(draft: Draft) -> Iterator[str]:
    """Return the group choices, including those of the base config, so that comments can show their origin."""
    for group, option in draft.options.items():
        override = "override " if group in _IN_BASE[draft.kind] or group == "pipeline" else ""
        yield _commented(f"  - {override}{group}: {option}", draft.notes[group])


def _tree(draft: Draft) -> Iterator[str]:
    def rank(key: str) -> int:
        section = key.partition(".")[0]
        return _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)

    nested: dict[str, Any] = {}
    for key in sorted(draft.values, key=rank):
        node = nested
        *sections, leaf = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = key
    yield from _lines(draft, nested, 0)


def _lines(draft: Draft, nested: Mapping[str, Any], depth: int) -> Iterator[str]:
    for name, item in nested.items():
        if isinstance(item, str):
            yield _commented(f"{'  ' * depth}{name}: {scalar(draft.values[item])}", draft.notes[item])
        else:
            yield f"{'  ' * depth}{name}:"
            yield from _lines(draft, item, depth + 1)


def _commented(text: str, notes: list[str]) -> str:
    return f"{text.ljust(_WIDTH)} # {'; '.join(notes)}" if notes else text

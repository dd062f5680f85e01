"""Translate a source file by a table into a draft config. Keys without an entry are reported, never dropped.

A table (`Table`) has rows by the source's dotted keys (`*` matches anything, `[]` an index), a function for results of
several keys decide together, and the defaults of the tool that would change the loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.dotted_keys import join

Kind = Literal["sft", "dpo", "kd", "grpo", "vlm", "dpo_vlm"]
WITH_PICTURES: Mapping[Kind, Kind] = {"sft": "vlm", "dpo": "dpo_vlm"}
"""The kinds that can read pictures, and the base config of each then."""
_OMIT = object()
UNKNOWN = "not known to this translation: look for it in `automodel options`"


@dataclass(frozen=True)
class KeyMapping:
    """One key of theirs.

    `ours` receives the value unchanged, or translated by `values` (lower-case source value -> our value; other values
    are written as comments). A key without a dot is a group option (`optimizer`). Without `ours`, `why` explains why
    there is no counterpart. With it, `why` explains the difference.
    """

    ours: str | None = None
    why: str = ""
    values: Mapping[str, object] | None = None


def to(ours: str, why: str = "", **values: object) -> KeyMapping:
    """A source key with a counterpart. Its values are keywords (`true`, `null`, or text)."""
    return KeyMapping(ours, why, values or None)


def none(why: str) -> KeyMapping:
    """A key without a counterpart."""
    return KeyMapping(None, why)


@dataclass(frozen=True)
class Default:
    """A default of the source tool that differs from ours."""

    ours: str
    value: object
    why: str
    kinds: Sequence[Kind] = ("sft", "dpo", "kd", "grpo")


@dataclass(frozen=True)
class Table:
    """Everything about one tool. `signs`: keys at the root (or dotted) that name it, and how many must be there."""

    tool: str
    slug: str
    signs: tuple[int, tuple[str, ...]]
    kind: Callable[[Draft], Kind]
    rows: Mapping[str, KeyMapping]
    run_lockstep: Callable[[Draft], None]
    defaults: Sequence[Default]
    averaging: str
    """How the source tool averages its loss, in comparison with this package."""
    finish: Callable[[Draft], None] = lambda draft: None
    """Runs after the rows and defaults."""

    def row(self, key: str) -> KeyMapping | None:
        """The row of a key: the exact one, else the first pattern in the table's order."""
        general = re.sub(r"\[\d+\]", "[]", key)
        if general in self.rows:
            return self.rows[general]
        return next((row for name, row in self.rows.items() if "*" in name and fnmatchcase(general, name)), None)


@dataclass
class Draft:
    """The leaves of a source file and their translation."""

    source: Mapping[str, object]
    gpus: int
    kind: Kind = "sft"
    """A draft with pictures is of kind sft or dpo: it has the defaults of that kind, and `reads_pictures`."""
    reads_pictures: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    """By key of this package: origin and difference."""
    theirs: dict[str, list[str]] = field(default_factory=dict)
    """By key of ours: the keys of theirs that decided it."""
    left: dict[str, str] = field(default_factory=dict)
    """Keys of theirs without a counterpart, and why."""
    done: set[str] = field(default_factory=set)
    undecided: list[str] = field(default_factory=list)
    """Settings that would change or omit training until the user decides about them."""

    def get(self, key: str, default: object = None) -> Any:
        """Return the source value, or `default` if it is absent or empty. Does not count as translated."""
        value = self.source.get(key)
        return default if value is None else value

    def has(self, prefix: str) -> bool:
        """Whether any key of theirs begins so."""
        return any(key.startswith(prefix) for key in self.source)

    def listed(self, key: str, default: object = None) -> list[Any]:
        """Return the source value as a list: `[]` if it is absent, one entry for a single value."""
        value = self.get(key, default)
        return value if isinstance(value, list) else [] if value is None else [value]

    def put(self, ours: str, value: object, *theirs: str, note: str = "") -> None:
        """Set a key (a group option if it has no dot) because of these source keys."""
        (self.values if "." in ours or ours in ("seed", "run_name", "output_dir", "rewards") else self.options)[
            ours
        ] = value
        there = [key for key in theirs if key in self.source]
        origin = ", ".join(f"{key}={format_value(self.source[key], 60)}" for key in there)
        self.notes[ours] = [text for text in (origin, note) if text]
        self.theirs[ours] = there
        self.done.update(there)

    def leave(self, key: str, why: str) -> None:
        """Report a source key without a counterpart, or with an unsupported value."""
        if key in self.source:
            self.left[key] = why
            self.done.add(key)

    def decide(self, key: str, what: str) -> None:
        """Add a decision about a source key to the top of the file."""
        origin = f"{key}={format_value(self.source[key], 60)}: " if key in self.source else f"{key}: "
        self.undecided.append(origin + what)
        self.leave(key, f"to decide: {what}")

    @property
    def base(self) -> str:
        """Name of the base config."""
        return WITH_PICTURES[self.kind] if self.reads_pictures else self.kind

    def is_set(self, ours: str) -> bool:
        return ours in self.values or ours in self.options


def translate(source: Mapping[str, object], table: Table, gpus: int, kind: Kind | None = None) -> Draft:
    """Translate a complete file. Afterwards every leaf is in `done`."""
    draft = Draft(flatten_keys(source), gpus)
    draft.kind = kind or table.kind(draft)
    for plain, with_pictures in WITH_PICTURES.items():
        if draft.kind == with_pictures:
            draft.kind, draft.reads_pictures = plain, True
    table.run_lockstep(draft)
    for key, value in draft.source.items():
        if key not in draft.done:
            _row(draft, table, key, value)
    for default in table.defaults:
        if draft.kind in default.kinds and not draft.is_set(default.ours):
            draft.put(default.ours, default.value, note=f"{table.tool}'s default; {default.why}")
    table.finish(draft)
    _leave_idle_validation(draft)
    _decay_embeddings(draft, table)
    _name_unknown(draft)
    if draft.kind == "grpo" and not draft.is_set("rewards"):
        why = "their rewards are code; until you name yours, `exact` reads the column answer (docs/rollouts/rewards.md)"
        draft.undecided.append(f"rewards: {why}")
    return draft


def _decay_embeddings(draft: Draft, table: Table) -> None:
    """Decay embeddings if the tool uses weight decay. This package does so only on request."""
    ours_by_default = 0.0 if draft.kind == "grpo" else 0.01
    decay = draft.values.get("optimizer.weight_decay", ours_by_default)
    if isinstance(decay, (int, float)) and decay > 0:
        draft.put("optimizer.decay_embeddings", True, note=f"{table.tool} decays embeddings and tied heads")


def _name_unknown(draft: Draft) -> None:
    """Keys that no table has may change the loss, unless they switch something off."""
    unknown = [key for key, why in draft.left.items() if why == UNKNOWN and draft.source[key] is not False]
    unknown = [key for key in unknown if not key.endswith("._target_")]
    if unknown:
        more = f" and {len(unknown) - 5} others" if len(unknown) > 5 else ""
        draft.undecided.append(
            f"{', '.join(unknown[:5])}{more}: not known to this translation, see the end of the file"
        )


def at_default(draft: Draft, defaults: Mapping[str, tuple[object, str]]) -> None:
    """Source keys without a counterpart, with their default and a reason. Defaults are ignored, other values
    reported."""
    for key, (default, why) in defaults.items():
        if draft.get(key, default) == default:
            draft.leave(key, why)
        else:
            draft.decide(key, why)


def _leave_idle_validation(draft: Draft) -> None:
    """Ignore the validation interval if no rows are held out. The source tool accepts it."""
    if any(key.startswith("data.validation_") for key in draft.values):
        return
    for ours in ("validation.every", "validation.at_start"):
        if draft.values.pop(ours, None) is not None:
            draft.notes.pop(ours)
            draft.left |= dict.fromkeys(draft.theirs[ours], f"{ours}, with rows held out: data.validation_size")


def _row(draft: Draft, table: Table, key: str, value: object) -> None:
    row = table.row(key)
    if row is not None and row.ours is not None and draft.is_set(row.ours):
        decided = "; ".join(draft.notes[row.ours]) or "another key"
        draft.leave(key, f"{row.ours} is decided by {decided}")
        return
    if row is not None and row.values is not None:
        known = row.values.get(format_value(value).lower(), _OMIT)
        if known is not _OMIT:
            assert row.ours is not None
            draft.put(row.ours, known, key, note=row.why)
            return
    if value is None or value in ("", [], {}):
        draft.leave(key, "empty there")
    elif row is None:
        draft.leave(key, UNKNOWN)
    elif row.ours is None:
        draft.leave(key, row.why)
    elif row.values is not None:
        draft.leave(key, f"{row.ours} has no such value{f'; {row.why}' if row.why else ''}")
    else:
        draft.put(row.ours, value, key, note=row.why)


def flatten_keys(value: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves by dotted key, and items of a list of mappings as `key[0].name`. Other lists are leaves."""
    leaves: dict[str, object] = {}
    match value:
        case {**sections} if sections:
            for name, item in sections.items():
                leaves |= flatten_keys(item, join(prefix, name))
        case list() if any(isinstance(item, Mapping) for item in value):
            for i, item in enumerate(value):
                leaves |= flatten_keys(item, f"{prefix}[{i}]")
        case _:
            leaves[prefix] = value
    return leaves

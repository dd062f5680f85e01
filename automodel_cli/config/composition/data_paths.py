"""Replace the dataset of a bundled group by the user's dataset.

`data: dolly` names a dataset and describes its columns, split and configuration. The description does not apply to
another dataset. If the user sets `data.path`, `data.datasets` or `data.generator`, the bundled description is removed.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from automodel_cli.config.diagnostics import Origin

NAMES = {"path": "data.path", "datasets": "data.datasets", "generator": "data.generator._target_"}
"""Keys of `data` that name a dataset, and the key whose origin decides who named it."""
DESCRIBES = ("name", "revision", "split", "format", "column_mapping", "text_unit", "validation_split")
"""Keys of `data` that describe one dataset."""
WHOLE = ("data.column_mapping",)
"""Mappings that an override replaces. `data.column_mapping.prompt=question` changes one entry."""


def forget_described(
    config: DictConfig, origins: MutableMapping[str, Origin], before: Any, is_bundled: Callable[[str], bool]
) -> None:
    """Drop the bundled description of a dataset if the user has set another dataset.

    `before`: `data.path` as the files have it, before the command line.
    """
    section = OmegaConf.select(config, "data")
    if not isinstance(section, DictConfig):
        return
    named = [name for name, key in NAMES.items() if section.get(name) and _by_user(origins, key, is_bundled)]
    repeated = named == ["path"] and not origins["data.path"].file and section.path == before
    if len(named) != 1 or repeated:
        return
    OmegaConf.set_struct(config, False)
    for name in (*(name for name in NAMES if name != named[0]), *DESCRIBES):
        _forget(section, name, origins, is_bundled)


def _by_user(origins: MutableMapping[str, Origin], key: str, is_bundled: Callable[[str], bool]) -> bool:
    return key in origins and not is_bundled(origins[key].file)


def _forget(
    section: DictConfig, name: str, origins: MutableMapping[str, Origin], is_bundled: Callable[[str], bool]
) -> None:
    """Delete a key of bundled origin. Of a column mapping, delete its entries of bundled origin."""
    key = f"data.{name}"
    below = [other for other in origins if f"{other}.".startswith(f"{key}.")]
    bundled = [other for other in below if is_bundled(origins[other].file)]
    if name not in section or not bundled:
        return
    kept = [other for other in below if other not in (key, *bundled)]
    if kept and name != "column_mapping":
        return
    for other in bundled:
        if kept and other != key:
            del section[name][other.removeprefix(f"{key}.")]
        if other != key or not kept:
            del origins[other]
    if not kept:
        del section[name]

"""Pairs of keys with the same purpose: if one is set explicitly, a default of the other is dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from automodel_cli.config.diagnostics import COMMAND_LINE, Origin
from automodel_cli.config.dotted_keys import value_at

ALTERNATIVES = (("train.max_steps", "train.epochs"),)
"""Limits of a run. Both apply only if they are set in the same place."""


def replace_alternatives(config: DictConfig, origins: dict[str, Origin], files: Sequence[str]) -> None:
    """Set the alternative to null whose place comes first: `files` in their order, then the command line."""
    for pair in ALTERNATIVES:
        given = [key for key in pair if _value(config, key) is not None]
        if len(given) < 2:
            continue
        earlier, later = sorted(given, key=lambda key: _origin_rank(origins, files, key))
        if _origin_rank(origins, files, earlier) == _origin_rank(origins, files, later):
            continue
        OmegaConf.update(config, earlier, None, force_add=True)
        origins[earlier] = Origin("", text=f"replaced by {later} ({origins[later]})")


def _value(config: DictConfig, key: str) -> object:
    return value_at(OmegaConf.to_container(config, resolve=False), key)


def _origin_rank(origins: Mapping[str, Origin], files: Sequence[str], key: str) -> int:
    """Return the rank of the place that set `key`. Origins other than files and the command line come first."""
    origin = origins.get(key)
    if origin is None:
        return -1
    if origin.text == COMMAND_LINE:
        return len(files)
    return max((i for i, file in enumerate(files) if file == origin.file), default=-1)

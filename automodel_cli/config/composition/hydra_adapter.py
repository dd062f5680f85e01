"""The only file that touches Hydra. `compose` and line marks both need the defaults list, which has no public name.

Built on `ConfigLoaderImpl` and `create_defaults_list` (unchanged over 1.3.x, which pyproject pins) rather than on
`initialize_config_dir`: no global state, no composition of Hydra's own 40 logging and sweeper keys, and the files in
merge order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.default_element import ConfigDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, RangeSweep, ValueType
from hydra.core.override_parser.types import Override as Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException as HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from automodel_cli.config.composition.yaml_limits import check_file, check_num_files

ComposeErrors = (HydraException, OmegaConfBaseException, ValueError)


@dataclass(frozen=True)
class Merged:
    """The composed config before value overrides, and its files in merge order with the key each was merged under.
    `unasked`: groups whose option is a default that no file and no override has chosen."""

    config: DictConfig
    files: list[tuple[Path, str]]
    unasked: frozenset[str]


def parse(override: str) -> Override:
    """One command-line override in Hydra's grammar. Raises HydraException."""
    return OverridesParser.create().parse_override(override)


def _is_list(override: Override) -> bool:
    """Return a list of values, `choice(...)` or `range(...)`. A glob over group options uses a loader of Hydra."""
    is_glob = override.value_type is ValueType.GLOB_CHOICE_SWEEP
    return (override.is_choice_sweep() and not is_glob) or override.is_range_sweep()


def points(overrides: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Return the runs of a sweep in Hydra's order, the last override fastest, as (swept overrides, all overrides).
    Raises HydraException, and ValueError for overrides without a finite list of values."""
    choices: list[list[tuple[str, bool]]] = []
    for text in overrides:
        override = parse(text)
        if not override.is_sweep_override():
            choices.append([(text, False)])
            continue
        if not _is_list(override):
            raise ValueError(text)
        key = override.get_key_element()
        choices.append([(f"{key}={value}", True) for value in override.sweep_string_iterator()])
    combinations = itertools.product(*choices)
    return [([text for text, swept in point if swept], [text for text, _ in point]) for point in combinations]


@dataclass(frozen=True)
class SweepAxis:
    """Search space of one override: `values` (`ordered`: an evenly spaced range), or all numbers from `low` to
    `high`."""

    key: str
    values: tuple[str, ...] = ()
    ordered: bool = False
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        numbers = " whole numbers" * self.whole + ", evenly over their logarithm" * self.log
        return f"{self.key}  {', '.join(self.values) or f'{self.low:g} to {self.high:g}{numbers}'}"

    def ends(self) -> tuple[str, ...]:
        """All values, or the first and the last."""
        if self.values:
            return (self.values[0], self.values[-1]) if self.ordered else self.values
        return (self.text(self.low), self.text(self.high))

    def text(self, number: float) -> str:
        """A number as Hydra reads it."""
        if self.ordered:
            return min(self.values, key=lambda value: abs(float(value) - number))
        return str(round(number)) if self.whole else repr(float(number))


def sweep_axes(overrides: Sequence[str]) -> tuple[list[SweepAxis], list[str]]:
    """Return the search space and the fixed overrides. Supports `choice(...)`, lists, `range(...)`, and `interval(...)`
    with the tags `log` and `int`. Raises HydraException, and ValueError for other forms."""
    axes, fixed = [], []
    for text in overrides:
        override = parse(text)
        if not override.is_sweep_override():
            fixed.append(text)
            continue
        key, value = str(override.get_key_element()), override.value()
        if isinstance(value, IntervalSweep):
            low, high = value.start, value.end
            if low is None or high is None or not low < high or ("log" in value.tags and low <= 0):
                raise ValueError(text)
            is_integer = "int" in value.tags or (isinstance(low, int) and isinstance(high, int))
            axes.append(SweepAxis(key, low=low, high=high, log="log" in value.tags, whole=is_integer))
        elif _is_list(override):
            ordered = isinstance(value, RangeSweep) and not value.shuffle
            axes.append(SweepAxis(key, tuple(override.sweep_string_iterator()), ordered=ordered))
        else:
            raise ValueError(text)
    return axes, fixed


_NEXT = " (next)"
"""Ends the name of a file in the defaults list of a file of the same name, or of a bundled file. The file further along
the search path is meant."""


class _Checked(CachingConfigRepository):
    """Check the size of a file before Hydra composes it: a few lines of YAML can expand beyond the memory. If the
    defaults of a file name the file itself, as `sft.yaml` with `defaults: [sft, _self_]`, the next one of that name is
    used. Defaults of a bundled recipe are bundled recipes, also if a recipe of the user has the same name."""

    def __init__(self, repository: Any, folders: Sequence[Path]):
        super().__init__(repository)
        self._folders, self._num_read = folders, 0
        self._next: _Checked | None = None
        if len(folders) > 1:
            self._next = _Checked(ConfigLoaderImpl(_search_path(folders[1:])).repository, folders[1:])

    def load_config(self, config_path: str) -> Any:
        path = config_path.removesuffix(".yaml")
        if path.endswith(_NEXT) and self._next is not None:
            path = path.removesuffix(_NEXT)
            loaded, is_first = self._next.load_config(path), False
        else:
            self._num_read += 1
            check_num_files(self._num_read, f"{path}.yaml")
            if file := next((folder / f"{path}.yaml" for folder in self._folders if _has(folder, path)), None):
                check_file(file)
            loaded, is_first = super().load_config(config_path), _has(self._folders[0], path)
        for default in () if loaded is None else loaded.defaults_list or ():
            if isinstance(default, ConfigDefault) and default.path:
                name = _named(default.path, path)
                if (name == path or not is_first) and self._is_twice(name):
                    default.path += _NEXT
        return loaded

    def _is_twice(self, path: str) -> bool:
        """Return whether the first folder and a later one have a file of this name."""
        return _has(self._folders[0], path) and any(_has(folder, path) for folder in self._folders[1:])


def _has(folder: Path, path: str) -> bool:
    return (folder / f"{path}.yaml").is_file()


def _named(default: str, within: str) -> str:
    """Return the name of an entry in the defaults list of `within`."""
    folder = within.rpartition("/")[0]
    return default.lstrip("/") if default.startswith("/") or not folder else f"{folder}/{default}"


def _search_path(folders: Sequence[Path]) -> ConfigSearchPathImpl:
    search = ConfigSearchPathImpl()
    for i, folder in enumerate(folders):
        search.append("main" if i == 0 else "bundled", f"file://{folder}")
    search.append("schema", "structured://")
    return search


class Loader:
    """Config files on a search path of folders, the first folder winning."""

    def __init__(self, folders: Sequence[Path]):
        version.setbase("1.3")
        Plugins.instance()  # registers the file:// source
        self._loader = ConfigLoaderImpl(_search_path(folders))
        self._repository = _Checked(self._loader.repository, folders)

    def options(self, group: str) -> list[str]:
        """Return the files of a config group. Empty for a plain key (and for a folder of data that happens to have its
        name).
        """
        return self._repository.get_group_options(group) if self._repository.group_exists(group) else []

    def groups_in_use(self, name: str) -> dict[str, Any]:
        """Return the groups of the defaults list with their options."""
        result: dict[str, Any] = self._defaults(name, []).overrides.known_choices
        return result

    def merge(self, name: str, group_overrides: Sequence[Override]) -> Merged:
        """Merge the defaults list of `name`. Raises one of `ComposeErrors` or MarkedYAMLError."""
        listed = self._defaults(name, list(group_overrides))
        defaults, overrides = listed.defaults, listed.overrides
        config = self._loader._compose_config_from_defaults_list(defaults=defaults, repo=self._repository)
        files = []
        for default in defaults:
            loaded = self._repository.load_config(default.config_path)
            assert loaded is not None, default.config_path  # it was merged a line above
            package = default.package if default.package is not None else loaded.header["package"]
            folder = loaded.path.removeprefix("file://")
            name = default.config_path.removesuffix(".yaml").removesuffix(_NEXT)
            files.append((Path(folder) / f"{name}.yaml", package or ""))
        return Merged(config, files, frozenset(set(overrides.known_choices) - set(overrides.override_choices)))

    def _defaults(self, name: str, overrides: list[Override]) -> Any:
        return create_defaults_list(
            repo=self._repository, config_name=name, overrides_list=overrides, prepend_hydra=False, skip_missing=False
        )

"""Compose YAML files and command-line overrides into one config that records the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from automodel_cli.config.composition import bundled_recipes, data_paths, hydra_adapter
from automodel_cli.config.composition.bundled_recipes import locate
from automodel_cli.config.composition.overrides import apply_override, split_overrides
from automodel_cli.config.composition.yaml_limits import MAX_CHARACTERS, MAX_DEPTH, check_file, too_large
from automodel_cli.config.composition.yaml_marks import read_marks, yaml_error
from automodel_cli.config.diagnostics import DEFAULT, Origin, Problem, as_error
from automodel_cli.config.dotted_keys import value_at
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.keys.exclusive import replace_alternatives
from automodel_cli.config.security import secrets
from automodel_cli.config.security.safe_files import read_regular
from automodel_cli.config.security.trust import NOTHING, Trust

MISSING = "???"
OmegaConf.register_new_resolver("oc.env", secrets.read_env, replace=True)


@dataclass(frozen=True)
class Composed:
    """A composed config, not yet checked.

    `tree` is plain and resolved. `problems` are errors of the composition (spelling, interpolations), which `check`
    raises together with its own. `path` is the named file. `run_dir` is set if a run is resumed or exported from its
    folder; then `content` is the file as it was read. `trust` is the code that the user allows the config to execute.
    """

    name: str
    path: Path
    overrides: tuple[str, ...]
    tree: dict[str, Any]
    problems: tuple[Problem, ...]
    files: tuple[Path, ...]
    run_dir: Path | None
    trust: Trust = field(kw_only=True, default=NOTHING)
    content: bytes = field(kw_only=True, default=b"", repr=False)
    _config: DictConfig = field(repr=False)
    _origins: dict[str, Origin] = field(repr=False)
    _unasked: frozenset[str] = field(repr=False)
    _chosen: frozenset[str] = field(repr=False)
    """Groups whose option the command line names."""

    def where(self, key: str) -> Origin:
        """Return the origin of `key`, or "default" if it is not set."""
        return self._origins.get(key, Origin("", text=DEFAULT))

    def origin(self, key: str) -> str:
        """`conf/x.yaml:12`, `command line` or `default`."""
        return str(self.where(key))

    def nearest_origin(self, key: str) -> Origin:
        """Return the origin of `key` or of the closest section above it. A missing key would belong there."""
        while key:
            if key in self._origins:
                return self._origins[key]
            key = key.rpartition(".")[0]
        return Origin(bundled_recipes.display(self.path), 1)

    def error(self, problems: Sequence[Problem]) -> ConfigError:
        """`problems` as one error that names this config."""
        return as_error(problems, bundled_recipes.display(self.path))

    def forget_replaced(self, section: str, name: str) -> bool:
        """Drop a bundled option of another `_target_` than the user's later one, set directly or as a group option.
        Returns whether the key was such an option."""
        key = f"{section}.{name}"
        option, target = self.where(key).file, self.where(f"{section}._target_").file
        named = section in self._chosen or not _is_bundled(target)
        if not (_is_bundled(option) and named):
            return False
        OmegaConf.set_struct(self._config, False)
        del OmegaConf.select(self._config, section)[name]
        del self._origins[key]
        return True

    def forget_unasked(self, section: str) -> None:
        """Drop bundled default entries of a section of named nodes if the user adds entries. Example: a config with
        `rewards.mine` does not get the default `rewards.exact`.
        """
        if section not in self._unasked:
            return
        entries: dict[str, object] = self.tree[section]
        of_default = f"conf/{section}/"
        dropped = [
            name
            for name in entries
            if all(
                origin.file.startswith(of_default)
                for key, origin in self._origins.items()
                if f"{key}.".startswith(f"{section}.{name}.")
            )
        ]
        if len(dropped) == len(entries):
            return
        OmegaConf.set_struct(self._config, False)
        for name in dropped:
            del entries[name], self._config[section][name]
            for key in [key for key in self._origins if f"{key}.".startswith(f"{section}.{name}.")]:
                del self._origins[key]

    def public(self) -> dict[str, object]:
        """The config for display. Interpolations (a secret of the environment, or
        a value that holds one) stay unresolved.
        """
        raw: object = OmegaConf.to_container(self._config, resolve=False)
        return cast("dict[str, Any]", raw)

    def shown(self, key: str) -> object:
        """Return the value of `key` in `public`, or the interpolation that contains the key."""
        public, absent = self.public(), object()
        while (value := value_at(public, key, absent)) is absent:
            key = key.rpartition(".")[0]
            assert key, "the key is in the config"
        return value

    def to_yaml(self) -> str:
        """The composed config with interpolations UNRESOLVED (secrets stay in the environment) and each origin as a
        comment.
        """
        raw: Any = OmegaConf.to_container(self._config, resolve=False)
        return "\n".join(_emit(raw, "", 0, self)) + "\n"


def compose(conf: str | Path, overrides: Sequence[str] = (), *, run_dir: Path | None = None) -> Composed:
    """Compose `conf` (a path ending in .yaml, or a bundled name) and apply the overrides in Hydra's grammar.

    Search path: the folder of the file, then the bundled conf/. A value override may set any key: the checker rejects
    unknown keys with a suggestion, which Hydra's struct mode does not offer. Raises ConfigError.
    """
    path = locate(str(conf))
    if run_dir is None:
        return _compose(path, path, overrides, None)
    # Other users may be able to write into a run's folder. The composed files are read once, so that the seal of the
    # run (`config.remembered`) is compared with exactly this content, and no other file of the folder is used as a
    # config.
    check_file(path)
    content = read_regular(path)
    with bundled_recipes.own_copy(path, content) as copy:
        return replace(_compose(copy, path, overrides, run_dir), content=content)


def _compose(path: Path, original: Path, overrides: Sequence[str], run_dir: Path | None) -> Composed:
    """Compose the file at `path`, which is `original` or a copy of it."""
    folders = [path.parent] if path.parent == bundled_recipes.conf_dir() else [path.parent, bundled_recipes.conf_dir()]
    loader = hydra_adapter.Loader(folders)
    read_marks(path)  # broken YAML is named with its line before Hydra sees the file
    try:
        in_use = loader.groups_in_use(path.stem)
        groups, values = split_overrides(loader, in_use, overrides)
        merged = loader.merge(path.stem, groups)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        raise yaml_error(Path(error.problem_mark.name if error.problem_mark else path), error) from error
    except RecursionError:
        raise ConfigError(
            f"the defaults list of {bundled_recipes.display(path)} is circular",
            code="invalid_yaml",
            keys=("defaults",),
            origin=f"defaults of {bundled_recipes.display(path)}",
            fix="remove the circular entry, or name a bundled recipe: automodel recipes ls",
        ) from None
    except hydra_adapter.ComposeErrors as error:
        raise ConfigError(
            _first_lines(error).replace(str(path.parent), str(original.parent)),
            code="invalid_yaml",
            keys=("defaults",),
            origin=f"defaults of {bundled_recipes.display(path)}",
        ) from error

    origins: dict[str, Origin] = {}
    problems: list[Problem] = []
    for file, package in merged.files:
        _record_file(file, package, origins, problems)
    data_before = OmegaConf.select(merged.config, "data.path")
    for override in values:
        if override in groups and override.key_or_group not in merged.config:
            continue  # the file of the group was all there was
        apply_override(merged.config, override, origins)
    replace_alternatives(merged.config, origins, [bundled_recipes.display(file) for file, _ in merged.files])
    data_paths.forget_described(merged.config, origins, data_before, _is_bundled)
    _check_interpolations(merged.config, origins, path)
    problems = [p for p in problems if origins.get(p.key) is p.where]  # skip problems of values replaced later
    tree = _resolve(merged.config, origins, problems)
    name = run_dir.name if run_dir else path.stem
    files = tuple(dict.fromkeys(original if file == path else file for file, _ in merged.files))
    chosen = frozenset(override.key_or_group.lstrip("+") for override in groups)
    described = (tree, tuple(problems), files, run_dir, merged.config, origins, merged.unasked, chosen)
    return Composed(name, original, tuple(overrides), *described)


def _is_bundled(file: str) -> bool:
    return file.startswith("conf/") and (bundled_recipes.conf_dir() / file[5:]).is_file()


def _first_lines(error: Exception) -> str:
    """Hydra's own text without its advice about flags that this command line does not have."""
    lines = [line for line in str(error).splitlines() if line.strip() and "To append" not in line]
    return "\n  ".join(lines) or type(error).__name__


def _record_file(path: Path, package: str, origins: dict[str, Origin], problems: list[Problem]) -> None:
    shown = bundled_recipes.display(path)
    for mark in read_marks(path):
        if mark.key == "defaults" or mark.key.startswith("defaults."):
            continue
        key = f"{package}.{mark.key}" if package else mark.key
        origin = Origin(shown, mark.line)
        origins[key] = origin
        if mark.refused:
            problems.append(Problem("ambiguous", key, mark.refused, origin, f"{mark.key} ({origin})", mark.fix))


def _check_interpolations(config: DictConfig, origins: Mapping[str, Origin], path: Path) -> None:
    raw: Any = OmegaConf.to_container(config, resolve=False)
    key = too_large(raw)
    if key is not None:
        raise ConfigError(
            f"the interpolations of {key} expand to more than {MAX_CHARACTERS:,} characters, or nest more than "
            f"{MAX_DEPTH} levels",
            code="limit_exceeded",
            keys=(key,),
            origin=f"{key} ({origins.get(key, Origin(bundled_recipes.display(path), 1))})",
        )


def _resolve(config: DictConfig, origins: Mapping[str, Origin], problems: list[Problem]) -> dict[str, object]:
    """Resolve every interpolation of the plain tree. A failing one stays as text and becomes a problem."""

    def plain(node: DictConfig | ListConfig, prefix: str) -> Any:
        raws: object = OmegaConf.to_container(node, resolve=False)
        if isinstance(node, ListConfig):
            return [item(node, i, f"{prefix}.{i}", raws) for i in range(len(node))]
        names: list[Any] = list(node)
        return {str(k): item(node, k, f"{prefix}.{k}" if prefix else str(k), raws) for k in names}

    def item(node: DictConfig | ListConfig, k: Any, key: str, raws: Any) -> Any:
        if OmegaConf.is_missing(node, k):
            return MISSING
        raw = raws[k] if OmegaConf.is_interpolation(node, k) else None
        where = origins.get(key, Origin("", text=DEFAULT))
        source = f"{key}={raw} ({where})"
        if raw is not None and ("${now:" in raw or "${hydra:" in raw):
            message = f"{key}={raw} is not supported because its value differs between ranks"
            problems.append(Problem("invalid_interpolation", key, message, where, source))
            return raw
        try:
            value = node[k]
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            message = f"{key}={raw} cannot be resolved: {reason}"
            problems.append(Problem("invalid_interpolation", key, message, where, source))
            return raw
        return plain(value, key) if isinstance(value, (DictConfig, ListConfig)) else value

    result: dict[str, Any] = plain(config, "")
    return result


def _emit(raw: dict[str, object], prefix: str, indent: int, composed: Composed) -> list[str]:
    """Return the YAML lines of a section. Scalars and flat lists take one line, with the origin as comment."""
    lines = []
    pad = "  " * indent
    for name, value in raw.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        label = pad + scalar(name)
        if isinstance(value, dict) and value:
            lines.append(f"{label}:")
            lines += _emit(value, key, indent + 1, composed)
        else:
            lines.append(f"{label}: {scalar(value)}  # {composed.origin(key)}")
    return lines


def scalar(value: object) -> str:
    """A scalar, a list or an empty dict on one line of YAML that OmegaConf reads back as the same value."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    flow = True if isinstance(value, (list, dict)) else None
    dumper = get_omega_conf_dumper()
    text = yaml.dump(
        value, Dumper=dumper, default_flow_style=flow, default_style=style, width=10**9, allow_unicode=True
    )
    return str(text.removesuffix("\n").removesuffix("\n...").strip())

"""Compose YAML files and command-line overrides into one config that records the origin of every value."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import OmegaConfBaseException

from automodel_cli.config import bundled_recipes, data_paths, hydra_adapter, secrets
from automodel_cli.config.diagnostics import COMMAND_LINE, DEFAULT, Origin, Problem, as_error
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.exclusive_keys import replace_alternatives
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.safe_files import read_regular
from automodel_cli.config.trust import NOTHING, Trust
from automodel_cli.config.yaml_limits import MAX_CHARACTERS, MAX_DEPTH, check_file, check_override, too_large
from automodel_cli.config.yaml_marks import read_marks, yaml_error

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
        entries: dict[str, Any] = self.tree[section]
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

    def public(self) -> dict[str, Any]:
        """The config for display. Interpolations (a secret of the environment, or
        a value that holds one) stay unresolved.
        """
        raw: Any = OmegaConf.to_container(self._config, resolve=False)
        return cast("dict[str, Any]", raw)

    def shown(self, key: str) -> Any:
        """Return the value of `key` in `public`, or the interpolation that contains the key."""
        value: Any = self.public()
        for part in key.split("."):
            if isinstance(value, str):
                break
            value = value[int(part)] if isinstance(value, list) else value[part]
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
        groups, values = _split(loader, in_use, overrides)
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
        _apply(merged.config, override, origins)
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


def locate(conf: str) -> Path:
    """The absolute path of `-c CONF`. Raises ConfigError with the nearest bundled name or file."""
    path = Path(conf)
    if path.suffix == ".yml":
        fix = f"mv {word(conf)} {word(path.with_suffix('.yaml'))}"
        raise ConfigError(f"{conf} must end in .yaml", code="unsupported_file_type", keys=("--conf",), fix=fix)
    if path.suffix == ".yaml" or "/" in conf:
        if path.is_file() and path.suffix == ".yaml":
            return path.resolve()
        if path.with_suffix(".yaml").is_file():
            fix = f"-c {word(path.with_suffix('.yaml'))}"
            raise ConfigError(f"{conf} must end in .yaml", code="missing_file", keys=("--conf",), fix=fix)
        if path.parent == Path("conf") and path.suffix == ".yaml" and path.stem in bundled_recipes.recipe_names():
            return bundled_recipes.recipe_path(path.stem)  # as messages and the docs call it, from wherever it is typed
        known = f"-c {path.stem}   (bundled)" if path.stem in bundled_recipes.recipe_names() else None
        suggestion = known or _nearest_file(path)
        raise ConfigError(f"config file {conf} does not exist", code="missing_file", keys=("--conf",), fix=suggestion)
    if conf in bundled_recipes.recipe_names():
        return bundled_recipes.recipe_path(conf)
    if Path(f"{conf}.yaml").is_file():
        message = f"{conf} is not a bundled recipe, but the file {conf}.yaml exists"
        raise ConfigError(message, code="unknown_name", keys=("--conf",), fix=f"-c {word(conf)}.yaml")
    near = difflib.get_close_matches(conf, bundled_recipes.recipe_names(), 1, 0.5)
    raise ConfigError(
        f"{conf} is not a bundled recipe",
        code="unknown_name",
        keys=("--conf",),
        fix=f"-c {near[0]}" if near else "automodel recipes ls   (lists them)",
    )


def _nearest_file(path: Path) -> str | None:
    siblings = [str(p) for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), siblings, 1, 0.6)
    return f"-c {word(near[0])}" if near else None


def _first_lines(error: Exception) -> str:
    """Hydra's own text without its advice about flags that this command line does not have."""
    lines = [line for line in str(error).splitlines() if line.strip() and "To append" not in line]
    return "\n  ".join(lines) or type(error).__name__


def _split(
    loader: hydra_adapter.Loader, in_use: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[list[hydra_adapter.Override], list[hydra_adapter.Override]]:
    """Parse the overrides into choices of group options (for Hydra) and values (for us). `~GROUP` is both: it removes
    the file of the group, and the recipe's section of the same name."""
    groups, values = [], []
    for text in overrides:
        override = _parse(text)
        group, option = override.key_or_group, override.value()
        options = loader.options(group)
        choice = isinstance(option, str) and bool(options)
        if override.package is not None or "/" in group or (override.is_delete() and group in in_use):
            groups.append(override)
        elif choice and not override.is_delete():
            if option not in options:
                near = difflib.get_close_matches(str(option), options, 1, 0.5)
                raise ConfigError(
                    f"{group}={option} must be one of: {', '.join(options)}",
                    code="invalid_choice",
                    keys=(group,),
                    origin=f"{text} (command line)",
                    fix=f"{group}={near[0] if near else options[0]}",
                )
            groups.append(_parse(f"{group}={option}" if group in in_use else f"+{group}={option}"))
        else:
            values.append(override)
    removed = [override for override in groups if override.is_delete() and override.package is None]
    chosen = {override.key_or_group.lstrip("+"): override for override in groups if not override.is_delete()}
    for override in removed:
        if (other := chosen.get(override.key_or_group)) is not None:
            raise ConfigError(
                f"{override.input_line} and {other.key_or_group.lstrip('+')}={other.value()} exclude each other",
                code="mutually_exclusive",
                keys=(override.key_or_group,),
                origin=f"{override.input_line} (command line)",
            )
    return groups, [*removed, *values]


def _parse(text: str) -> hydra_adapter.Override:
    key, equals, value = text.partition("=")
    check_override(text)
    origin = f"{text} (command line)"
    if text.startswith("-"):
        message = f"{text} is not an option. Write overrides without dashes"
        raise ConfigError(message, code="invalid_override", keys=(key,), origin=origin, fix=text.lstrip("-"))
    if not equals and not text.startswith("~"):
        message = f"{text} must have the form key=value"
        raise ConfigError(message, code="invalid_override", keys=(key,), origin=origin, fix=f"{key}=VALUE")
    try:
        override = hydra_adapter.parse(text)
    except hydra_adapter.HydraException as error:
        quoted = "'" + f'{key}="{value}"' + "'"
        message = f"{text} cannot be parsed. Quote the value"
        raise ConfigError(message, code="invalid_override", keys=(key,), origin=origin, fix=quoted) from error
    if override.is_sweep_override():
        raise _several_values(key, value, origin)
    return override


def _several_values(key: str, value: str, origin: str) -> ConfigError:
    """The answer to Hydra's sweeps: one run has one value, and `automodel sweep` makes several runs."""
    values = value.split(",")
    several = f"several runs: automodel sweep -c CONF {key}={value}"
    if "(" in value:  # range(1,4), choice(a,b)
        message = f"{key}={value} is a sweep, but a run needs one value ({several})"
        return ConfigError(message, code="invalid_override", keys=(key,), origin=origin)
    return ConfigError(
        f"{key}={value} has {len(values)} values, but a run needs one ({several})",
        code="invalid_override",
        keys=(key,),
        origin=origin,
        fix=f"{key}={values[0]}, or '{key}=[{value}]' where the key takes a list",
    )


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


def _apply(config: DictConfig, override: hydra_adapter.Override, origins: dict[str, Origin]) -> None:
    """Set, merge (a dict) or delete one key. `key=`, `+key=` and `++key=` are equal, because the checker knows the
    keys."""
    key, value = override.key_or_group, override.value()
    origin = f"{override.input_line} (command line)"
    try:
        if override.is_delete():
            parent, _, leaf = key.rpartition(".")
            section = OmegaConf.select(config, parent) if parent else config
            if not isinstance(section, DictConfig) or leaf not in section:
                message = f"{key} cannot be removed because it is not set"
                raise ConfigError(message, code="invalid_override", keys=(key,), origin=origin)
            del section[leaf]
            origins.pop(key, None)
            return
        whole = value == {} or key in data_paths.WHOLE
        OmegaConf.update(config, key, value, merge=not whole, force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise _cannot_be_set(config, key, error, origin) from error
    if whole:
        for below in [other for other in origins if other.startswith(f"{key}.")]:
            del origins[below]
    _record_override(key, value, origins)
    while key := key.rpartition(".")[0]:  # a section that exists only because of this override
        origins.setdefault(key, Origin("", text=COMMAND_LINE))


def _cannot_be_set(config: DictConfig, key: str, error: Exception, origin: str) -> ConfigError:
    """Return the error of an override that uses a name or an invalid index in a list, or a key below a plain value."""
    parts = key.split(".")
    above = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
    listed = next((name for name in above if isinstance(_selected(config, name), ListConfig)), None)
    if listed is None:
        message = f"{key} cannot be set: {str(error).splitlines()[0]}"
        return ConfigError(message, code="invalid_override", keys=(key,), origin=origin)
    rest = key[len(listed) + 1 :]
    number = len(_selected(config, listed))
    if rest.partition(".")[0].isdigit():
        held = "is empty" if number == 0 else f"has entries 0 to {number - 1}"
        message = f"{key} cannot be set: {listed} {held}"
        return ConfigError(message, code="invalid_override", keys=(key,), origin=origin)
    from automodel_cli.config import key_reference

    target = key_reference.node_for(listed, {rest: None})
    value = origin.removesuffix(" (command line)").partition("=")[2]
    fix = shlex.quote(f"{listed}=[{{_target_: {target}, {rest}: {value}}}]") if target else None
    message = f"{key} cannot be set: {listed} is a list, whose entries have numbers instead of names"
    return ConfigError(message, code="invalid_override", keys=(key,), origin=origin, fix=fix)


def _selected(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None


def _record_override(key: str, value: object, origins: dict[str, Origin]) -> None:
    origins[key] = Origin("", text=COMMAND_LINE)
    if isinstance(value, dict):
        for k, v in value.items():
            _record_override(f"{key}.{k}", v, origins)
    elif isinstance(value, list):
        for i, v in enumerate(value):
            _record_override(f"{key}.{i}", v, origins)


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


def _resolve(config: DictConfig, origins: Mapping[str, Origin], problems: list[Problem]) -> dict[str, Any]:
    """Resolve every interpolation of the plain tree. A failing one stays as text and becomes a problem."""

    def plain(node: DictConfig | ListConfig, prefix: str) -> Any:
        raws: Any = OmegaConf.to_container(node, resolve=False)
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


def _emit(raw: dict[str, Any], prefix: str, indent: int, composed: Composed) -> list[str]:
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

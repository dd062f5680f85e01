"""Shell completion: recipe names for `-c`, options of groups and config keys for overrides.

Runs at every press of Tab, so it does not compose: it follows the `defaults` of the file by name until a `_target_`
appears, and walks that class's annotations. Neither Hydra nor torch is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from click import Context, Parameter
from click.shell_completion import CompletionItem

from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.errors import ConfigError


def names(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Bundled recipes, with their summary as help."""
    matches = [n for n in bundled_recipes.recipe_names() if n.startswith(incomplete)]
    return [CompletionItem(n, help=bundled_recipes.describe_recipe(n).summary) for n in matches]


def runs(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
    """The runs below runs/, by name."""
    names_of_runs = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    return [CompletionItem(name) for name in names_of_runs if name.startswith(incomplete)]


def configs(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
    """Bundled recipes, and the .yaml files and folders of the path typed so far."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    entries = [p for p in sorted(folder.glob("*")) if p.is_dir() or p.suffix == ".yaml"] if folder.is_dir() else []
    paths = [f"{p}/" if p.is_dir() else str(p) for p in entries if not p.name.startswith(".")]
    return names(ctx, param, incomplete) + [CompletionItem(p) for p in paths if p.startswith(incomplete)]


def overrides(ctx: Context, param: Parameter, incomplete: str) -> list[CompletionItem]:
    """`group=option` once the key is typed, else every key of the recipe as `key=`."""
    key, equals, value = incomplete.partition("=")
    if equals:
        options = sorted(p.stem for p in (bundled_recipes.conf_dir() / key).glob("*.yaml"))
        return [CompletionItem(f"{key}={option}") for option in options if option.startswith(value)]
    return [CompletionItem(f"{k}=") for k in sorted(keys(ctx.params.get("conf") or "")) if k.startswith(incomplete)]


def keys(conf: str) -> set[str]:
    """Return every key that the recipe of `conf` accepts, plus those in its files. Of all bundled recipes if `conf` is
    unknown.
    """
    from automodel_cli.config import schema
    from automodel_cli.config.security import targets

    path = bundled_recipes.recipe_path(conf) if conf in bundled_recipes.recipe_names() else Path(conf)
    known_keys: set[str] = set()
    trees = list(_chain(path, "", set())) if path.is_file() else []
    for package, tree in trees:
        known_keys |= {f"{package}.{k}" if package else k for k in _flat(tree)}
        target = tree.get("_target_")
        if isinstance(target, str):
            try:
                known_keys |= set(schema.keys(targets.resolve(target), f"{package}." if package else ""))
            except ConfigError:
                continue  # a package that only --trust-package opens: its keys are not offered
    return {k for k in known_keys if not k.rpartition(".")[2].startswith("_")}


def _chain(path: Path, package: str, seen: set[Path]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the file and its defaults, each with its key. By name only, without overrides and packages."""
    import yaml

    if path in seen or not path.is_file():
        return
    seen.add(path)
    tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    yield package, {k: v for k, v in tree.items() if k != "defaults"}
    for entry in tree.get("defaults", ()):
        match entry:
            case str() if entry != "_self_":
                yield from _first(path, entry, package, seen)
            case dict():
                for name, option in entry.items():
                    group = str(name).removeprefix("override ").lstrip("/")
                    yield from _first(path, f"{group}/{option}", group.replace("/", "."), seen)


def _first(path: Path, name: str, package: str, seen: set[Path]) -> Iterator[tuple[str, dict[str, object]]]:
    for folder in (path.parent, bundled_recipes.conf_dir()):
        candidate = folder / f"{name.lstrip('/')}.yaml"
        if candidate.is_file():
            yield from _chain(candidate, package, seen)
            return


def _flat(tree: dict[str, object], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"

"""Code that a config may execute on this machine, and the permission for it.

A YAML file may come from anybody, so it cannot allow anything by itself: only the command line of the person who runs
it can, with `--trust command`, `--trust remote-code` or `--trust-package NAME`. A field of a config node that executes
code declares it in its metadata (`field(metadata=runs(...))`), and the checker requires the flag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_cli.config.schema import is_dataclass_type

COMMAND, REMOTE_CODE = "command", "remote-code"
WORDS = (COMMAND, REMOTE_CODE)
"""Values of `--trust`."""

_KNOWN_PACKAGES = ("torch", "transformers", "automodel_cli")
_KEY = "trust"


@dataclass(frozen=True)
class Trust:
    """Permissions of the user: `words` of WORDS, and packages whose code a config may name. `note` explains why
    remembered permissions do not apply, if so."""

    words: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    note: str = ""

    def __or__(self, other: Trust) -> Trust:
        packages = tuple(dict.fromkeys((*self.packages, *other.packages)))
        return Trust(self.words | other.words, packages, self.note or other.note)

    def __bool__(self) -> bool:
        return bool(self.words or self.packages)

    def allows(self, need: Need) -> bool:
        """Whether `need` may be met."""
        return need.option in self.options()

    def options(self) -> tuple[str, ...]:
        """Return the permissions as command-line options, one text each."""
        return (*(f"--trust {w}" for w in sorted(self.words)), *(f"--trust-package {p}" for p in self.packages))

    def arguments(self) -> tuple[str, ...]:
        """The words of a command line that allow the same."""
        return tuple(word for option in self.options() for word in option.split(" ", 1))


NOTHING = Trust()


@dataclass(frozen=True)
class Need:
    """A config value that executes code: its effect, and the option that allows it."""

    key: str
    what: str
    option: str


@dataclass(frozen=True)
class _Danger:
    word: str | None
    what: str
    when: Callable[[Any], bool]


def executes_code(word: str, what: str, when: Callable[[Any], bool] = bool) -> dict[str, object]:
    """Metadata of a field that executes code if `when(value)`. `what` completes "KEY=VALUE ..."."""
    return {_KEY: _Danger(word, what, when)}


def imports() -> dict[str, object]:
    """Metadata of a field that holds import paths (one, or a list of them)."""
    return {_KEY: _Danger(None, "", bool)}


def needs(target: object, name: str, key: str, value: object) -> list[Need]:
    """Return the code that the field `name` of the config node `target` executes with `value`. `key` is its config
    key."""
    if not is_dataclass_type(target):
        return []
    danger = next((f.metadata.get(_KEY) for f in dataclasses.fields(target) if f.name == name), None)
    if danger is None or not danger.when(value):
        return []
    if danger.word is not None:
        return [Need(key, danger.what, f"--trust {danger.word}")]
    return [
        Need(key, f"imports the package {package}", f"--trust-package {package}")
        for package in _packages(value if isinstance(value, (list, tuple)) else [value])
    ]


def _packages(paths: Sequence[object]) -> list[str]:
    tops = dict.fromkeys(path.partition(".")[0] for path in paths if isinstance(path, str))
    return [top for top in tops if top not in _KNOWN_PACKAGES]

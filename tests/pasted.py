"""Every fix that a test meets is pasted: into the config that was refused, or into the node that refused.

`watch` records each ConfigError of this process. A fix that can be pasted (`config.fixes`) must parse, name
keys that exist, and be gone from what is wrong afterwards. Errors of other processes are not seen.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from automodel_cli.config import fix_syntax, schema
from automodel_cli.config.check import check_config
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.composition.compose import Composed, compose
from automodel_cli.config.diagnostics import Problem
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security import targets

_RECIPES = (
    "automodel_cli.recipes.sft.SFTRecipe",
    "automodel_cli.recipes.dpo.DPORecipe",
    "automodel_cli.recipes.rm.RMRecipe",
    "automodel_cli.recipes.classifier.ClassifierRecipe",
    "automodel_cli.recipes.embedding.EmbeddingRecipe",
    "automodel_cli.recipes.kd.KDRecipe",
    "automodel_cli.recipes.grpo.GRPORecipe",
)
_CHECK = check_config.__code__


class Watch:
    """What was wrong with the fixes of one test."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.busy = False

    def raised(self, error: ConfigError, frame: FrameType) -> None:
        """A ConfigError was made: the keys of its fix must exist, and the node that made it must accept its own."""
        if frame.f_globals.get("__name__", "").startswith("automodel_cli.config."):
            return  # the checker's own; `refused` sees them
        node = _node_of(frame)
        for text in fix_syntax.alternatives(error.fix or ""):
            if fix_syntax.kind(text) != "overrides":
                continue
            for word in fix_syntax.shell_words(text):
                key = word.lstrip("~").partition("=")[0]
                own = node is not None and key.partition(".")[0] in vars(node)
                if not (own or key in error.keys or _exists(key, word)):
                    self.complaints.append(f"{text!r} names the unknown key {key}, as a fix of: {error.message}")

    def refused(self, composed: Composed, problems: list[Problem], frame: FrameType) -> None:
        """A config was refused: pasted behind its overrides, each fix must remove the problem that it belongs to."""
        if frame.f_code is not _CHECK:
            return
        before = {(problem.key, problem.message) for problem in problems}
        for problem in problems:
            for text in fix_syntax.alternatives(problem.fix or ""):
                if fix_syntax.kind(text) != "overrides":
                    continue
                try:
                    after = _pasted(composed, problem, text, frame.f_locals["trust"])
                except ConfigError as error:
                    self.complaints.append(f"{text!r} cannot be pasted: {error.message}; a fix of: {problem.message}")
                    continue
                if (problem.key, problem.message) in after:
                    self.complaints.append(f"{text!r} does not help against: {problem.message}")
                keys = {word.lstrip("~").partition("=")[0] for word in fix_syntax.shell_words(text)}
                for key, message in after - before:
                    if key in keys and message.startswith("unknown"):
                        self.complaints.append(f"{text!r} is refused: {message}; a fix of: {problem.message}")


def _pasted(composed: Composed, problem: Problem, text: str, trust: Any) -> set[tuple[str, str]]:
    """What is wrong with the config once the fix is typed; an unknown key or section is taken away for it."""
    removes = f"~{problem.key}" in fix_syntax.shell_words(text)
    is_unknown = problem.message.startswith(("unknown key", "unknown section"))
    instead = [f"~{problem.key}"] if is_unknown and not removes else []
    return {(p.key, p.message) for p in _problems(composed, [*instead, *fix_syntax.shell_words(text)], trust)}


def _problems(composed: Composed, words: list[str], trust: Any) -> list[Problem]:
    again = compose(composed.path, (*composed.overrides, *words), run_dir=composed.run_dir)
    found: list[Problem] = []
    object.__setattr__(again, "error", lambda problems: found.extend(problems) or ConfigError("refused again"))
    try:
        check_config(again, trust)
    except ConfigError:
        if not found:
            raise
    return found


def _node_of(frame: FrameType | None) -> Any:
    """The config node whose `__post_init__` (or a helper of it) is making the error."""
    for _ in range(5):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if owner is not None and dataclasses.is_dataclass(owner) and targets.is_node(type(owner)):
            return owner
        frame = frame.f_back
    return None


@functools.cache
def _known() -> tuple[frozenset[str], tuple[str, ...]]:
    """Every key of the recipes, with all nodes that a field may hold; and the prefixes below which any key goes."""
    keys: set[str] = set()
    free: set[str] = set()

    def walk(target: Any, prefix: str, depth: int) -> None:
        for name, parameter in schema.signature(target).parameters.items():
            keys.add(prefix + name)
            inner = schema.dataclass_members(parameter.hint)
            if (not inner and not _is_plain(parameter.hint)) or depth > 5:
                free.add(f"{prefix}{name}.")
            for node in inner:
                keys.add(f"{prefix}{name}._target_")
                walk(node, f"{prefix}{name}.", depth + 1)

    for path in _RECIPES:
        walk(targets.resolve(path), "", 0)
    return frozenset(keys), tuple(free)


def _is_plain(hint: Any) -> bool:
    """Whether no member could hold keys of its own."""
    return all(member in (int, float, str, bool, type(None)) for member in schema.members(hint))


def _exists(key: str, word: str) -> bool:
    keys, free = _known()
    group, option = bundled_recipes.conf_dir() / key.replace(".", "/"), word.partition("=")[2]
    return key in keys or key.startswith(free) or (group / f"{option}.yaml").is_file()


@contextmanager
def watch() -> Iterator[Watch]:
    """Record the errors that are made until the end of the block."""
    found = Watch()
    make, refuse = ConfigError.__init__, Composed.error

    def init(self: ConfigError, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        if self.fix and not found.busy:
            found.raised(self, sys._getframe(1))

    def error(self: Composed, problems: list[Problem]) -> ConfigError:
        if not found.busy:
            found.busy = True
            try:
                found.refused(self, list(problems), sys._getframe(1))
            finally:
                found.busy = False
        return refuse(self, problems)

    ConfigError.__init__ = init  # type: ignore[method-assign]
    Composed.error = error  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ConfigError.__init__ = make  # type: ignore[method-assign]
        Composed.error = refuse  # type: ignore[method-assign]

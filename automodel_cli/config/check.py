"""Strict check in two passes: `bind.Binder` compares the composed tree with annotations without calling anything.
`build.Builder` then constructs the valid parts."""

from __future__ import annotations

import os
import sys

from automodel_cli.config.composition.compose import Composed
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.instantiate import Builder
from automodel_cli.config.security.trust import NOTHING, Need, Trust
from automodel_cli.config.type_checking import WRONG, Binder


def check_config(
    composed: Composed, trust: Trust = NOTHING, untrusted: list[Need] | None = None, *, kind: type | None = None
) -> object:
    """Check the complete config and build its root.

    Only config nodes (frozen dataclasses without side effects) are constructed before all errors are known.

    Args:
        trust: code that the command line allows the config to execute.
        untrusted: if given, untrusted values are appended to it and their fields get the default. Otherwise they are
            errors. For commands that execute nothing.
        kind: class of a root without `_target_`. If None, such a file is rejected.

    Raises:
        ConfigError: contains all errors, sorted by file and line.
    """
    for name in trust.packages:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"--trust-package {name} is not the name of a package", code="invalid_value", keys=("--trust-package",)
            )
    if trust.packages and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a trusted package may be next to the config; appended, it shadows nothing
    binder = Binder(composed, trust, untrusted)
    root = binder.root(kind)
    problems = binder.problems
    built = WRONG
    for only_nodes in (True, False):  # nodes are pure, so building them twice is only a matter of microseconds
        if root is not None and built is WRONG:
            built = Builder(composed, problems, only_nodes).build(root)
        if problems:
            raise composed.error(problems)
    return built

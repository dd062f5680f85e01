"""The strict check, in two passes: `bind.Binder` walks the composed tree against annotations and calls nothing,
`build.Builder` constructs what is clean."""

from __future__ import annotations

import os
import sys
from typing import Any

from automodel_cli.config.compose import Composed
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.instantiate import Builder
from automodel_cli.config.trust import NOTHING, Need, Trust
from automodel_cli.config.type_checking import WRONG, Binder


def check_config(
    composed: Composed, trust: Trust = NOTHING, untrusted: list[Need] | None = None, *, kind: type | None = None
) -> Any:
    """Check the whole config and build its root. `trust` is what the command line allows it to execute.

    Nothing but config nodes (frozen dataclasses, pure to construct) runs before every error is known. Raises one
    ConfigError with all of them, sorted by file and line. What is not trusted is an error too; with the list
    `untrusted` it is added there instead, and the field has its default: for commands that execute nothing. `kind` is
    the class of a root that names no `_target_`; without one such a file is refused.
    """
    for name in trust.packages:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(
                f"--trust-package {name} is not the name of a package", code="invalid_value", keys=("--trust-package",)
            )
    if trust.packages and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a trusted package may lie beside the user's config; appended, it shadows nothing
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

"""The one exception family that users see. Everything else that escapes is a bug of ours."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_cli.config.fixes import label
from automodel_cli.config.plain_text import visible
from automodel_cli.config.secrets import hide


class ConfigError(Exception):
    """What is wrong, where the value came from, and one fix that works when pasted.

    `message` states value and rule; `origin` is `key=value (file:line)` or `(command line)`; `fix` is pasteable, or
    advice in words, which is labelled `try` (`config.fixes`). A config node that refuses its own values in
    `__post_init__` names the offending fields in `keys` (dotted, relative to the node), may name them so in `fix`, and
    leaves `origin` to the checker, which knows the files. Rendered as::

        ConfigError: mesh does not fit: pp_size=2 x dp_size=4 needs 8 ranks, but 4 were started
          from  mesh.dp_size=4 (conf/llama3_8b.yaml:12)
          fix   mesh.dp_size=2, or start 8 ranks
    """

    exit_code = 2

    def __init__(self, message: str, *, keys: Sequence[str] = (), origin: str | None = None, fix: str | None = None):
        message = _printable(message)
        super().__init__(message)
        self.message, self.keys, self.origin, self.fix = message, tuple(keys), origin, fix

    def __str__(self) -> str:
        lines = [self.message]
        if self.origin:
            lines.append(f"  from  {self.origin}")
        if self.fix:
            lines.append(f"  {label(self.fix)}   {self.fix}")
        return _printable("\n".join(lines))


def _printable(text: str) -> str:
    """Without values of the environment, and without control characters, which a row or a server may have sent."""
    return visible(hide(text))


class DataError(ConfigError):
    """A dataset or a row that cannot be used: named by file and row number."""

    exit_code = 3


class RunError(ConfigError):
    """A run that had to stop: non-finite numbers, a failed export check, a full disk."""

    exit_code = 1

"""Exceptions that users see. Any other exception that escapes is a bug in this package."""

from __future__ import annotations

from collections.abc import Sequence

from automodel_cli.config.fix_syntax import label
from automodel_cli.config.plain_text import visible
from automodel_cli.config.security.secrets import hide


class ConfigError(Exception):
    """An error in a config or command line: message, origin and a fix.

    A config node that rejects its own values in `__post_init__` names its fields in `keys` and may use them in `fix`.
    It leaves `origin` to the checker, which knows the files. Rendered as::

        ConfigError [mesh_size]: mesh does not fit: pp_size=2 x dp_size=4 needs 8 ranks, but 4 were started
          from  mesh.dp_size=4 (conf/llama3_8b.yaml:12)
          fix   mesh.dp_size=2, or start 8 ranks

    Args:
        message: the value and the rule that it breaks.
        code: a code of `config.error_codes`. Identifies the cause together with `keys`. Defaults to the code of the
            class, so that custom code needs none.
        keys: dotted config keys, relative to the node that raises.
        origin: `key=value (file:line)` or `(command line)`.
        fix: text that can be pasted, or advice, which is labeled `try` (`config.fixes`).
    """

    exit_code = 2
    code = "invalid_config"
    problems: tuple[tuple[str, str], ...] = ()
    """(code, key) of each error, if this error lists several (`several_errors`)."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        keys: Sequence[str] = (),
        origin: str | None = None,
        fix: str | None = None,
    ):
        message = _printable(message)
        super().__init__(message)
        self.message, self.keys, self.origin, self.fix = message, tuple(keys), origin, fix
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        lines = [self.message]
        if self.origin:
            lines.append(f"  from  {self.origin}")
        if self.fix:
            lines.append(f"  {label(self.fix)}   {self.fix}")
        return _printable("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        """Preserve all attributes in the copy that another process receives, whatever arguments the class takes."""
        return _restored, (type(self), self.args, self.__dict__)

    @property
    def heading(self) -> str:
        """The class and the code, as printed before the message."""
        return f"{type(self).__name__} [{self.code}]:"

    @property
    def full_text(self) -> str:
        """The error as printed without colors."""
        return f"{self.heading} {self}"


def _restored(kind: type[ConfigError], arguments: tuple[object, ...], attributes: dict[str, object]) -> ConfigError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


def _printable(text: str) -> str:
    """Remove secrets and control characters, which rows and servers may contain."""
    return visible(hide(text))


class DataError(ConfigError):
    """A dataset or a row cannot be used. The message names file and row."""

    exit_code = 3
    code = "invalid_data"


class RunError(ConfigError):
    """A run had to stop, for example because of a non-finite loss, a failed export check or a full disk."""

    exit_code = 1
    code = "run_failed"

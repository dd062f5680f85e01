"""Errors of a task under the keys that its config has. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from automodel_cli.config.errors import ConfigError

_SETTING = re.compile(r"(?<![\w.])(?=(?:data|rewards)\.[\w.]+=)")
_ROW_FIX = re.compile(r"^ +fix .*$", re.MULTILINE)


@contextmanager
def errors_of(task: str) -> Iterator[None]:
    """Name settings in keys and fixes of errors in full: `data.seq_len=8` as `tasks.held_out.data.seq_len=8`.

    Args:
        task: key of the task, such as `tasks.held_out`.
    """
    try:
        yield
    except ConfigError as error:
        error.keys = tuple(f"{task}.{key}" if key.startswith(("data.", "rewards.")) else key for key in error.keys)
        error.fix = error.fix and _SETTING.sub(f"{task}.", error.fix)
        error.message = _ROW_FIX.sub(lambda fix: _SETTING.sub(f"{task}.", fix[0]), error.message)
        raise

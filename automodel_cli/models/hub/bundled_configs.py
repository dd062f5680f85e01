"""Bundled config.json files of the models that recipes name, so that `plan` and `dryrun` need no network.

They contain the fields published on the hub. A test compares them with the published parameter counts. Runs do not use
them: they read the config next to the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "shipped_configs"
_PREFERRED: ContextVar[bool] = ContextVar("shipped configs are preferred", default=False)


@contextmanager
def preferred() -> Iterator[None]:
    """Use bundled configs for hub ids inside the context, without a hub request."""
    token = _PREFERRED.set(True)
    try:
        yield
    finally:
        _PREFERRED.reset(token)


def fields(name: str, revision: str | None) -> dict[str, Any] | None:
    """Return the fields of the bundled config of `name` if bundled configs are preferred and there is one."""
    if not _PREFERRED.get() or revision is not None or Path(name).is_dir():
        return None
    path = bundled_config_path(name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def bundled_config_path(name: str) -> Path:
    """Return the path of the bundled config of a hub id, which may not exist."""
    return _FOLDER / f"{name.replace('/', '--')}.json"

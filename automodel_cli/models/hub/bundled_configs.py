"""The config.json of the models that bundled recipes name, so that `plan` and `dryrun` of them need no network.

Written from what the hub's repositories publish, and held to their published parameter counts by a test. A run never
reads these: it takes the config that lies beside its weights.
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
    """Inside, a hub id that a bundled recipe names is not looked up."""
    token = _PREFERRED.set(True)
    try:
        yield
    finally:
        _PREFERRED.reset(token)


def fields(name: str, revision: str | None) -> dict[str, Any] | None:
    """The fields of `name`'s config.json where the caller prefers the shipped one and there is one."""
    if not _PREFERRED.get() or revision is not None or Path(name).is_dir():
        return None
    path = bundled_config_path(name)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def bundled_config_path(name: str) -> Path:
    """Where the config of a hub id would be."""
    return _FOLDER / f"{name.replace('/', '--')}.json"


def bundled_model_names() -> list[str]:
    """Hub ids whose config is shipped."""
    return sorted(path.stem.replace("--", "/") for path in _FOLDER.glob("*.json"))

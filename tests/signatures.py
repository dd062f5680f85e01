"""What packages take that tests cannot import, as scripts/signatures.py recorded it from their own files."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

FILE = Path(os.environ.get("AUTOMODEL_SIGNATURES", Path(__file__).parent / "vectors" / "signatures.json"))
SIGNATURES: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


def bind(package: str, member: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments by name, as the package's own function would take them. Raises TypeError like it would, and where the
    package has no such member any more."""
    recorded = SIGNATURES[package][member]
    if recorded is None:
        raise TypeError(f"{SIGNATURES[package]['release']} has no {member}")
    kinds = inspect.Parameter
    parameters = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in recorded["required"]]
    parameters += [kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=None) for name in recorded["optional"]]
    parameters += [kinds(name, kinds.KEYWORD_ONLY) for name in recorded["keyword_required"]]
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in recorded["keyword_only"]]
    parameters += [kinds(name, kinds.VAR_KEYWORD) for name in recorded["rest"]]
    return dict(inspect.Signature(parameters).bind(*args, **kwargs).arguments)

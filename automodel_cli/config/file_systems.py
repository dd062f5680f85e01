"""Packages of fsspec's file systems."""

from __future__ import annotations

import re


def package_for(protocol: str, error: ImportError) -> str:
    """Return the argument of `pip install` for a file system that fsspec cannot import."""
    if protocol in ("s3", "s3a"):
        return "'automodel-cli[s3]'"
    match = re.search(r"[Ii]nstall (?:the )?`?([\w-]+)", str(error))
    return match[1] if match else "the package"

"""Marks of single rows of a matrix."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """Rows that another one of the matrix stands for in the default run."""
    return [pytest.param(row, marks=pytest.mark.slow) for row in rows]


def nightly(*rows: Any) -> list[Any]:
    """Rows that another one of the matrix stands for before a merge."""
    return [pytest.param(row, marks=pytest.mark.nightly) for row in rows]

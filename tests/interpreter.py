"""Triton's interpreter, for kernels on the CPU: import this before anything that imports triton, whose own functions
are defined for it or not at all."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")
_REASON = (
    "triton is not installed"
    if importlib.util.find_spec("triton") is None
    else "triton was imported for another device"
    if os.environ.get("TRITON_INTERPRET") != "1"
    else ""
)
needs_triton = pytest.mark.skipif(bool(_REASON), reason=_REASON)

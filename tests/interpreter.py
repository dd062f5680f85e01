"""Triton's interpreter, for kernels on the CPU: import this before anything that imports triton, whose own functions
are defined for it or not at all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
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


_COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, kernels, kinds, fixed, warps = json.loads(sys.argv[1])
for kernel in (getattr(importlib.import_module(module), name) for name in kernels):
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    fixed_here = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed_here)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert len(binary.asm["cubin"]) > 0 and ".local" not in binary.asm["ptx"]  # no register goes to memory
"""


def compile_for_an_h100(
    module: str, kernels: list[str], kinds: dict[str, str], fixed: dict[str, object], *, warps: int = 4
) -> None:
    """Compile kernels without spilled registers. In a process of its own: here they are the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = json.dumps([module, kernels, kinds, fixed, warps])
    done = subprocess.run([sys.executable, "-c", _COMPILE, asked], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]

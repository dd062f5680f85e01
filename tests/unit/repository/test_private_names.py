"""Private names of torch stand in modules called `compat`, where scripts/new_release.py looks for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.pages import ROOT

STABLE = ("torch.utils._pytree", "torch.utils._python_dispatch", "torch.ops.aten.", "torch._foreach_")
"""Without a public form, and unchanged in all supported releases."""

ELSEWHERE = {
    "distributed/process_group.py",  # groups and their timeouts
    "distributed/tensor_parallel/sequence_parallel.py",  # overrides one method
    "pipelining/schedule/actions.py",  # the action of a schedule; torch-free otherwise
    "pipelining/megatron_core/tensors.py",  # the entry that Megatron-core calls
    "run/frozen_models/reference_model.py",  # a base class
}


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted private names of torch that a module uses through its imports."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                imported[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    imported = {name: path for name, path in imported.items() if path.partition(".")[0] == "torch"}
    used = list(imported.values())
    for node in ast.walk(tree):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if names and isinstance(node, ast.Name) and node.id in imported:
            used.append(".".join([imported[node.id], *names]))
    yield from (name for name in used if any(p.startswith("_") and not p.startswith("__") for p in name.split(".")))


def test_private_names_of_torch_stand_in_compat_modules() -> None:
    package = ROOT / "automodel_cli"
    found = {
        f"{path.relative_to(package)}: {name}"
        for path in package.rglob("*.py")
        if "compat" not in path.stem and path.relative_to(package).as_posix() not in ELSEWHERE
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
        if not name.startswith(STABLE)
    }
    assert not found


def test_private_names_are_found_through_every_kind_of_import() -> None:
    code = (
        "import torch, torch._inductor.config as c\n"
        "from torch.distributed import _world, device_mesh as m\n"
        "import numpy as np\n"
        "torch._dynamo.reset(); m.DeviceMesh._join(); np._core; torch.ops.x\n"
    )
    assert set(private_names(ast.parse(code))) == {
        "torch._inductor.config",
        "torch.distributed._world",
        "torch._dynamo.reset",
        "torch._dynamo",
        "torch.distributed.device_mesh.DeviceMesh._join",
    }

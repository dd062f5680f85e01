"""The page of tested versions and the search for missing names of scripts/new_release.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.pages import ROOT

_SPEC = importlib.util.spec_from_file_location("new_release", ROOT / "scripts/new_release.py")
assert _SPEC is not None and _SPEC.loader is not None
new_release = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(new_release)


def test_the_page_has_the_table_of_tested_releases() -> None:
    """`python scripts/new_release.py --render` writes it."""
    assert new_release.tested_table() in (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")


def test_names_that_a_release_removes_or_moves_are_found(tmp_path: Path) -> None:
    """`_fully_shard` is imported from torch, and `_get_dtype_plan` called on a model."""
    module = "torch/distributed/fsdp/_fully_shard"
    for place, files in {
        "old": {
            f"{module}/__init__.py": "",
            f"{module}/_fsdp_param_group.py": "",
            "transformers/m.py": "_get_dtype_plan",
        },
        "new": {f"{module}/__init__.py": "", "torch/elsewhere.py": "_fsdp_param_group = 1\n", "transformers/m.py": ""},
    }.items():
        for library in new_release.LIBRARIES:
            (tmp_path / place / f"{library}-1.0.dist-info").mkdir(parents=True)
        for name, text in files.items():
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    found = new_release.missing_names(tmp_path / "new", tmp_path / "old")[2:]
    assert found == [
        "- `_get_dtype_plan` of transformers",
        "- `_fsdp_param_group` of `torch.distributed.fsdp._fully_shard`, now in `torch/elsewhere.py`",
    ]
    assert len(new_release.missing_names(tmp_path / "old", tmp_path / "old")) == 1

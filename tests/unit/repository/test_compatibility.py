"""The page of tested versions and the search for missing names of scripts/new_release.py."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from automodel_cli.cli.tested_versions import TESTED
from tests.pages import ROOT

_SPEC = importlib.util.spec_from_file_location("new_release", ROOT / "scripts/new_release.py")
assert _SPEC is not None and _SPEC.loader is not None
new_release = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(new_release)


def test_the_page_has_the_table_of_tested_releases() -> None:
    """`python scripts/new_release.py --render` writes it."""
    assert new_release.tested_table() in (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")


@pytest.mark.slow
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


def test_ci_runs_with_the_tested_releases() -> None:
    """The workflow runs every combination of the tested torch with the oldest and newest transformers, .ci/run some."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["releases"]["strategy"]["matrix"]
    assert tuple(matrix["torch"]) == TESTED["torch"]
    assert matrix["transformers"] == [TESTED["transformers"][0], TESTED["transformers"][-1]]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    pairs = re.findall(r'"(2\.\S+) (5\.\S+)"', script)
    ends = (TESTED["torch"][0], TESTED["transformers"][0]), (TESTED["torch"][-1], TESTED["transformers"][-1])
    assert tuple(pairs[:2]) == ends
    pairs += [(row["torch"], row["transformers"]) for row in matrix["include"]]
    assert all(torch in TESTED["torch"] and name in TESTED["transformers"] for torch, name in pairs)

"""The keys of version 0.1: each is answered with a key that exists."""

from __future__ import annotations

import pytest

from automodel_cli.config.keys.renamed import RENAMED, renamed
from tests.pages import ROOT

REFERENCE = "".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "config.md", *(ROOT / "docs" / "config").glob("*.md"))
)
"""The generated reference, which names every key in full."""


@pytest.mark.parametrize("old", RENAMED)
def test_the_new_key_exists_and_the_old_one_does_not(old: str) -> None:
    assert f"`{RENAMED[old]}`" in REFERENCE and f'<a id="{old}"></a>' not in REFERENCE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rewards.mine.must_finish", "rewards.mine.require_eos"),
        ("validation.tasks.t.normalise", "validation.tasks.t.normalize"),
        ("data.datasets.0.columns", "data.datasets.0.column_mapping"),
        ("data.path", None),
    ],
)
def test_keys_below_names(old: str, new: str | None) -> None:
    assert renamed(old) == new

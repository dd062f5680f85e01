"""What the pages for contributors name exists, and the forms are what GitHub reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PAGES = ["CONTRIBUTING.md", "CHANGELOG.md", "docs/glossary.md", ".github/pull_request_template.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_path_on_the_page_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:automodel_cli|recipes|tests|scripts|docs|conf|\.ci)/[\w./]*)`", text))
    named |= set(
        re.findall(r"`((?:cli|config|data|distributed|models|objectives|pipelining|rollout)/[\w/]+(?:\.py|/))`", text)
    )
    named |= set(re.findall(r"\]\(([\w./]+)\)", text))
    folders = (ROOT, ROOT / "automodel_cli", (ROOT / page).parent)
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)] == []


def test_the_issue_form_asks_for_what_is_needed() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    required = {entry["id"] for entry in form["body"] if entry.get("validations", {}).get("required")}
    assert required == {"what", "doctor", "config"}
    assert "automodel doctor" in (ROOT / ".github/pull_request_template.md").read_text()


def test_the_workflow_runs_what_lands_here() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = workflow["jobs"]["everything"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    assert (ROOT / ".ci/run").stat().st_mode & 0o100, "executable"

"""Version, changelog, pins and supported Pythons agree with each other (scripts/release_check.py builds a release)."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from automodel_cli import __version__

ROOT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, SETTINGS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))


def test_the_newest_release_of_the_changelog_is_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (.*)$", text, re.M)
    assert releases[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", release) for release in releases[1:]]
    assert all(dated), releases
    versions, dates = zip(*(match.groups() for match in dated if match), strict=True)
    assert versions[0] == __version__
    assert list(dates) == sorted(dates, reverse=True)


def test_changes_are_sorted_into_sections_and_take_one_line_each() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert {line for line in lines if line.startswith("### ")} <= {
        f"### {name}" for name in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    }
    assert [line for line in lines if len(line) > 120] == []
    assert [line for line in lines if line.startswith(" ")] == [], "no second lines"


def test_the_version_has_one_source() -> None:
    assert PROJECT["dynamic"] == ["version"] and "version" not in PROJECT


def test_pins_are_releases_that_the_project_supports() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, list[str]] = {}
    for line in lines:
        if line and not line.startswith("#"):
            pin = Requirement(line)
            (clause,) = pin.specifier
            assert clause.operator == "==" and not pin.extras, line
            pins.setdefault(pin.name, []).append(clause.version)
    extras = PROJECT["optional-dependencies"]
    supported = [*PROJECT["dependencies"], *extras["dev"], *extras["docs"], *extras["rewards"], *extras["s3"]]
    for need in map(Requirement, supported):
        found = pins.get(need.name.lower(), [])
        assert found and all(version in need.specifier for version in found), f"{need}: {found}"


def test_the_workflow_tests_every_python_that_the_metadata_names() -> None:
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert WORKFLOW["jobs"]["python"]["strategy"]["matrix"]["version"] == named
    oldest = SpecifierSet(PROJECT["requires-python"])
    assert all(version in oldest for version in named) and "3.10" not in oldest


def test_everything_that_installs_for_development_uses_the_pins() -> None:
    setup = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))["postCreateCommand"]
    steps = [step.get("run", "") for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    torch = re.search(r"^install torch==(\S+)$", script, re.M)
    assert torch is not None
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    for command in [setup, *steps, *lines]:
        for install in re.findall(r"pip install [^&]*", command):
            chosen = "==" in install or "--no-deps" in install  # another torch, the oldest transformers
            assert chosen or "-c constraints.txt" in install, install
        assert all(version == torch[1] for version in re.findall(r"torch==(\S+) --index-url", command))


def test_inputs_of_actions_are_plain_values() -> None:
    """GitHub rejects a workflow whose `with` contains a list."""
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    inputs = [value for step in steps for value in step.get("with", {}).values()]
    assert inputs and all(isinstance(value, str | int | float | bool) for value in inputs)


def test_type_checkers_see_the_annotations() -> None:
    assert (ROOT / "automodel_cli/py.typed").is_file()
    assert "py.typed" in SETTINGS["package-data"]["automodel_cli"]


def test_the_wheel_has_every_package() -> None:
    """Checked at the end of CI by building it; this finds a forgotten folder earlier."""
    found = {".".join(path.relative_to(ROOT).parent.parts) for path in (ROOT / "automodel_cli").rglob("__init__.py")}
    assert found <= {*SETTINGS["packages"], "automodel_cli.recipes"}
